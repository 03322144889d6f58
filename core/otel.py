"""Spans that are recorded with OpenTelemetry, and sent from a thread of their own.

Imported only where traces are asked for: it needs the packages of the extra `otel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk import resources
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    from_exception,
    status_of,
)
from core.logs import event
from core.tracing import (
    END_REASON,
    NO_ATTRIBUTES,
    NO_SPAN,
    Attributes,
    Span,
    TraceContext,
    Tracer,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0
"""So long a process that stops waits for its last spans to be sent."""
_PROPAGATOR = TraceContextTextMapPropagator()
_SAID = (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition)
"""Errors whose text is told. Others' may quote a prompt, and of those nothing leaves."""


class Resource(NamedTuple):
    """Who sends spans."""

    service: str
    instance: str


class RecordedSpan(Span):
    """A span of OpenTelemetry's."""

    is_recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, is_call: bool = False
    ) -> RecordedSpan:
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            SpanKind.CLIENT if is_call else SpanKind.INTERNAL,
            attributes,
        )
        return RecordedSpan(self._tracer, span)

    def set(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        if self._span.is_recording():
            self._span.add_event(name, attributes)

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if isinstance(error, asyncio.CancelledError):
            self._span.set_attribute(END_REASON, "cancelled")
        elif error is not None:
            known = from_exception(error)
            self._span.set_attribute("error.type", status_of(known).grpc.name)
            said = known.message if isinstance(known, _SAID) else None
            self._span.set_status(Status(StatusCode.ERROR, said))
        self._span.end()

    def cancel(self, reason: str) -> None:
        self.set({END_REASON: reason})
        self.end()


class OtelTracer(Tracer):
    """Gives its spans to `processor`. Of traces that begin here, `sampling_ratio` is recorded."""

    def __init__(self, processor: SpanProcessor, resource: Resource, sampling_ratio: float) -> None:
        attributes = {
            resources.SERVICE_NAME: resource.service,
            resources.SERVICE_INSTANCE_ID: resource.instance,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling_ratio)),
            resource=resources.Resource.create(attributes),
            # It would wait for a collector that is away when the process ends.
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton")

    def serve(
        self, name: str, context: TraceContext, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        parent = None
        if context.traceparent:
            parent = _PROPAGATOR.extract(context._asdict())
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        # What is below a span that is not recorded is not recorded either.
        return RecordedSpan(self._tracer, span) if span.is_recording() else NO_SPAN

    async def close(self) -> None:
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(closed.set)

        # A thread that nobody has to wait for: a collector may not answer at all.
        threading.Thread(target=shut_down, daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await closed.wait()


class _Reason(logging.Filter):
    """Keeps what the exporter logs of each failed try, in place of the log."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


class ReportingExporter(SpanExporter):
    """Logs when spans begin to get lost, and how many were when `exporter` sends again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._num_lost = 0
        self._reason = _Reason()
        logging.getLogger(trace_exporter.__name__).addFilter(self._reason)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """In the processor's thread; may take as long as the exporter tries."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if self._num_lost == 0:
                self._log(logging.WARNING, "spans_not_sent", reason=self._reason.last)
            self._num_lost += len(spans)
        elif self._num_lost:
            self._log(logging.INFO, "spans_sent_again", num_lost=self._num_lost)
            self._num_lost = 0
        return result

    def _log(self, level: int, name: str, **fields: object) -> None:
        event(logger, level, name, endpoint=self._endpoint, **fields)

    def shutdown(self) -> None:
        self._exporter.shutdown()
        logging.getLogger(trace_exporter.__name__).removeFilter(self._reason)


def otlp_tracer(endpoint: str, resource: Resource, sampling_ratio: float) -> Tracer:
    """Sends spans with OTLP over HTTP, in batches.

    OpenTelemetry's own variables say what else there is to say: OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_BSP_SCHEDULE_DELAY, OTEL_RESOURCE_ATTRIBUTES and others.
    """
    exporter = ReportingExporter(trace_exporter.OTLPSpanExporter(endpoint), endpoint)
    return OtelTracer(BatchSpanProcessor(exporter), resource, sampling_ratio)
