"""Spans that a test's own tracer has recorded."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.otel import OtelTracer, Resource

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
CALLER = f"00-{TRACE_ID}-{CALLER_ID}-01"
"""A traceparent of a caller that wants to be traced."""


class Recorder:
    """`tracer` gives its spans to this object as they end."""

    def __init__(self, sampling_ratio: float = 1.0) -> None:
        self._memory = InMemorySpanExporter()
        resource = Resource("test-service", "test-1")
        self.tracer = OtelTracer(SimpleSpanProcessor(self._memory), resource, sampling_ratio)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._memory.get_finished_spans())

    @property
    def parents(self) -> dict[str, str]:
        """By the name of each span, the name of its parent; empty for one of another process."""
        names = {span.context.span_id: span.name for span in self.spans}
        return {
            span.name: names.get(span.parent.span_id, "") if span.parent else ""
            for span in self.spans
        }

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.all(name)
        return span

    def told(self, name: str) -> dict[str, Any]:
        """What the only span of that name says."""
        return dict(self.one(name).attributes or {})


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def traceparent(span: ReadableSpan) -> str:
    """What names it as a parent."""
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parent_id(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def trace_id(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"
