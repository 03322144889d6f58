"""Spans: what is recorded, what is not, and what becomes of them when nobody takes them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from core.errors import InvalidArgument, StartupError, TransferError
from core.otel import OtelTracer, ReportingExporter, Resource, otlp_tracer
from core.tracing import NO_CONTEXT, NO_SPAN, TraceContext, TracingSettings, make_tracer
from tests.traces import CALLER, CALLER_ID, TRACE_ID, Recorder, parent_id, trace_id, traceparent


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracer = make_tracer(TracingSettings(), "s", "i", 1.0)
    span = tracer.serve("call", TraceContext(CALLER))
    assert span is span.child("part") is NO_SPAN
    assert (span.is_recorded, span.traceparent) == (False, "")


def test_without_an_endpoint_what_records_is_not_even_imported() -> None:
    program = (
        "import sys, router.app\n"
        "from core.tracing import *\n"
        "make_tracer(TracingSettings(), 's', 'i')\n"
        "print({'core.otel', 'opentelemetry.sdk.trace'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_an_endpoint_without_the_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "core.otel")
    settings = TracingSettings(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(StartupError, match=r"--otlp-traces-endpoint needs .* extra `otel`"):
        make_tracer(settings, "s", "i")


def test_a_call_goes_on_with_the_trace_of_its_caller() -> None:
    recorder = Recorder(sampling_ratio=0.0)
    with recorder.tracer.serve("call", TraceContext(CALLER, "vendor=1")) as call:
        call.child("part").end()
        assert call.traceparent == traceparent(call._span)  # type: ignore[attr-defined]
    assert recorder.parents == {"call": "", "part": "call"}
    span = recorder.one("call")
    assert (trace_id(span), parent_id(span)) == (TRACE_ID, CALLER_ID)
    assert recorder.one("part").context.trace_state == {"vendor": "1"}
    assert span.resource.attributes["service.name"] == "test-service"
    assert span.resource.attributes["service.instance.id"] == "test-1"


def test_a_caller_that_is_not_traced_is_not_traced_here() -> None:
    recorder = Recorder(sampling_ratio=1.0)
    assert recorder.tracer.serve("call", TraceContext(f"{CALLER[:-1]}0")) is NO_SPAN


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_call_without_a_usable_trace_begins_one(given: str) -> None:
    recorder = Recorder()
    recorder.tracer.serve("call", TraceContext(given, "vendor=1")).end()
    assert recorder.one("call").parent is None


def test_the_ratio_counts_only_for_traces_that_begin_here() -> None:
    tracer = Recorder(sampling_ratio=0.25).tracer
    num_recorded = sum(tracer.serve("call", NO_CONTEXT).is_recorded for _ in range(2000))
    assert 350 < num_recorded < 650
    assert all(tracer.serve("call", TraceContext(CALLER)).is_recorded for _ in range(20))


def test_a_failure_tells_its_code_and_message() -> None:
    recorder = Recorder()
    with (
        pytest.raises(TransferError),
        recorder.tracer.serve("call", NO_CONTEXT) as span,
        span.child("part"),
    ):
        raise TransferError("the lease did not hold")
    for span in recorder.spans:
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "the lease did not hold"
        assert span.attributes == {"error.type": "UNAVAILABLE"}
        assert not span.events, "a stack trace would be of no use, and large"


def test_what_may_quote_a_prompt_is_not_told() -> None:
    recorder = Recorder()
    recorder.tracer.serve("call", NO_CONTEXT).end(InvalidArgument("a template said: secret"))
    recorder.tracer.serve("bug", NO_CONTEXT).end(ValueError("secret"))
    for name, code in (("call", "INVALID_ARGUMENT"), ("bug", "INTERNAL")):
        span = recorder.one(name)
        assert span.attributes["error.type"] == code
        assert span.status.description is None


def test_a_cancellation_is_no_failure_and_tells_why() -> None:
    recorder = Recorder()
    recorder.tracer.serve("silent", NO_CONTEXT).end(asyncio.CancelledError())
    recorder.tracer.serve("told", NO_CONTEXT).cancel("aborted")
    assert recorder.told("silent") == {"baton.end_reason": "cancelled"}
    assert recorder.told("told") == {"baton.end_reason": "aborted"}
    assert {span.status.status_code for span in recorder.spans} == {StatusCode.UNSET}


def test_only_the_first_end_counts() -> None:
    recorder = Recorder()
    with recorder.tracer.serve("call", NO_CONTEXT) as span:
        span.cancel("aborted")
        span.cancel("again")
        span.set({"late": True})
        span.event("late")
    assert recorder.told("call") == {"baton.end_reason": "aborted"}
    assert not recorder.one("call").events


class Collector(SpanExporter):
    """Takes spans while it `is_up`; `blocks` until it is told not to."""

    def __init__(self) -> None:
        self.is_up = True
        self.num_taken = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go.wait(60)
        if not self.is_up:
            return SpanExportResult.FAILURE
        self.num_taken += len(spans)
        return SpanExportResult.SUCCESS


def test_lost_spans_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.tracer.serve("call", NO_CONTEXT).end()
    collector = Collector()
    reporting = ReportingExporter(collector, "http://collector")
    caplog.set_level(logging.INFO)
    for is_up in (True, False, False, False, True, True):
        collector.is_up = is_up
        reporting.export(recorder.spans)
    reporting.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "spans_not_sent endpoint=http://collector reason=",
        "spans_sent_again endpoint=http://collector num_lost=3",
    ]


async def test_a_collector_that_is_away_is_logged_in_one_line_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5")
    monkeypatch.setattr("core.otel.CLOSE_TIMEOUT_S", 30.0)
    tracer = otlp_tracer("http://127.0.0.1:1/v1/traces", Resource("s", "i"), 1.0)
    tracer.serve("call", NO_CONTEXT).end()
    await tracer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("spans_not_sent endpoint=http://127.0.0.1:1/v1/traces")
    assert "Failed to export spans batch" in record.getMessage()


async def test_closing_sends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.otel.CLOSE_TIMEOUT_S", 30.0)
    collector = Collector()
    tracer = OtelTracer(BatchSpanProcessor(collector), Resource("s", "i"), 1.0)
    tracer.serve("call", NO_CONTEXT).end()
    assert collector.num_taken == 0
    await tracer.close()
    assert collector.num_taken == 1


async def test_closing_does_not_wait_for_a_collector_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.otel.CLOSE_TIMEOUT_S", 0.05)
    collector = Collector()
    collector.may_go.clear()
    tracer = OtelTracer(BatchSpanProcessor(collector), Resource("s", "i"), 1.0)
    tracer.serve("call", NO_CONTEXT).end()
    async with asyncio.timeout(30):
        await tracer.close()
    assert collector.num_taken == 0
    collector.may_go.set()
