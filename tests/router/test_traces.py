"""What the router records of a request, with fake workers around it."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from baton.v1 import inference_pb2
from core.errors import InvalidArgument, ResourceExhausted, TransferError
from tests.router.fakes import Script
from tests.router.stack import REPLY, prompt, stack, wait_for
from tests.traces import (
    CALLER,
    CALLER_ID,
    TRACE_ID,
    Recorder,
    events,
    parent_id,
    trace_id,
    traceparent,
)

ROOT = "text_completion tiny"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def serve(tmp_path, redis_server, recorder, monkeypatch):
    """`async with serve(...) as s`: a stack whose router's spans `recorder` gets."""
    monkeypatch.setattr("router.app.make_tracer", lambda *_: recorder.tracer)
    return lambda **options: stack(tmp_path / "tiny", redis_server.url, **options)


async def test_a_request_has_one_span_for_each_part_of_its_way(serve, recorder):
    async with serve() as s:
        await s.ask(prompt("Where?"))
    assert recorder.parents == {
        "router.admission": ROOT,
        "router.placement": ROOT,
        "router.attempt": ROOT,
        ROOT: "",
    }
    assert recorder.one(ROOT).kind is SpanKind.SERVER
    assert recorder.one(ROOT).status.status_code is StatusCode.UNSET


async def test_the_root_says_what_was_asked_for_and_what_came(serve, recorder):
    request = prompt("Where?", max_tokens=50, temperature=0.5, seed=2**64 - 1, stop=["secret"])
    request.request_id = "mine"
    async with serve() as s:
        await s.ask(request)
    told = recorder.told(ROOT)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "mine",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": -1,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": len(REPLY),
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "baton.tenant.class": "silver",
        "baton.attempts": 1,
        "baton.prefill_worker": "prefill-0",
        "baton.decode_worker": "decode-0",
        "baton.transferred_blocks": 3,
    }


async def test_both_workers_are_told_to_go_below_the_attempt(serve, recorder):
    async with serve() as s:
        await s.ask(prompt("Where?"))
        (told_prefill,), (told_decode,) = s.prefills[0].dispatches, s.decodes[0].dispatches
    attempt = recorder.one("router.attempt")
    assert told_prefill.traceparent == told_decode.traceparent == traceparent(attempt)
    assert attempt.kind is SpanKind.CLIENT
    assert recorder.told("router.attempt") == {
        "baton.request_id": told_decode.request_id,
        "baton.attempt": 1,
        "baton.prefill_worker": "prefill-0",
        "baton.decode_worker": "decode-0",
        "baton.cached_tokens": 4,
        "baton.transferred_blocks": 3,
    }
    heard = [event.attributes["baton.worker"] for event in attempt.events]
    assert sorted(heard) == ["decode-0", "prefill-0"]


async def test_each_attempt_has_a_span_and_the_failed_one_its_error(serve, recorder):
    fault = TransferError("the lease did not hold")
    script = Script(reply=list(REPLY), num_decode_tokens=4, fault=fault, num_faults=1)
    async with serve(script=script) as s:
        await s.ask(prompt())
    first, second = recorder.all("router.attempt")
    assert first.attributes["error.type"] == "UNAVAILABLE"
    assert first.status.description == "the lease did not hold"
    assert second.status.status_code is StatusCode.UNSET
    assert recorder.told(ROOT)["baton.attempts"] == 2
    assert len(recorder.all("router.placement")) == 2


async def test_an_attempt_that_decode_gives_back_says_so(serve, recorder):
    script = Script(reply=list(REPLY), num_decode_tokens=4, preempts=True, num_faults=1)
    async with serve(script=script) as s:
        await s.ask(prompt())
    first, second = recorder.all("router.attempt")
    assert first.attributes["baton.end_reason"] == "preempted"
    assert first.status.status_code is StatusCode.UNSET
    assert "baton.end_reason" not in second.attributes


async def test_a_client_that_leaves_ends_all_spans(serve, recorder):
    async with serve(script=Script(reply=list(REPLY), num_decode_tokens=4)) as s:
        call = s.stub.Generate(prompt())
        await anext(call.__aiter__())
        call.cancel()
        await wait_for(lambda: recorder.all("router.attempt"))
    assert recorder.told("router.attempt")["baton.end_reason"] == "cancelled"
    assert recorder.told(ROOT)["baton.end_reason"] == "the client left"
    assert recorder.told(ROOT)["gen_ai.usage.output_tokens"] > 0
    assert recorder.one(ROOT).status.status_code is StatusCode.UNSET


async def test_a_wrong_request_is_traced_with_its_error(serve, recorder):
    async with serve() as s:
        with pytest.raises(InvalidArgument):
            await s.ask(prompt(top_p=7.0))
    assert recorder.parents == {ROOT: ""}
    assert recorder.told(ROOT)["error.type"] == "INVALID_ARGUMENT"


async def test_a_refusal_is_seen_at_the_admission(serve, recorder, monkeypatch):
    def refuse(*_):
        raise ResourceExhausted("come back later")

    monkeypatch.setattr("router.admission.Admission._enter", refuse)
    async with serve() as s:
        with pytest.raises(ResourceExhausted):
            await s.ask(prompt())
    assert recorder.told("router.admission") == {"error.type": "RESOURCE_EXHAUSTED"}
    assert recorder.told(ROOT)["error.type"] == "RESOURCE_EXHAUSTED"


async def test_a_call_by_grpc_goes_on_with_the_trace_of_its_caller(serve, recorder):
    async with serve() as s:
        await s.ask(prompt(), metadata=(("traceparent", CALLER), ("tracestate", "vendor=1")))
    root = recorder.one(ROOT)
    assert (trace_id(root), parent_id(root)) == (TRACE_ID, CALLER_ID)
    assert root.context.trace_state == {"vendor": "1"}


async def test_a_call_by_http_goes_on_with_the_trace_of_its_caller(serve, recorder):
    body = {"prompt": ["a", "b"], "max_tokens": 3}
    async with serve() as s, httpx2.AsyncClient(base_url=s.http_url, timeout=30) as http:
        headers = {"traceparent": CALLER, "tracestate": "vendor=1"}
        await http.post("/v1/completions", json=body, headers=headers)
    first, second = recorder.all(ROOT)
    assert parent_id(first) == parent_id(second) == CALLER_ID
    assert first.context.trace_state == {"vendor": "1"}


async def test_a_request_that_is_not_sampled_costs_the_workers_nothing(serve, recorder):
    async with serve() as s:
        await s.ask(prompt(), metadata=(("traceparent", f"{CALLER[:-1]}0"),))
        assert s.decodes[0].dispatches[0].traceparent == ""
    assert recorder.spans == []


async def test_a_call_that_joins_another_adds_no_spans(serve, recorder):
    request = inference_pb2.GenerateRequest(prompt="ab", request_id="same")
    async with serve() as s:
        await asyncio.gather(*(s.ask(request) for _ in range(3)))
    assert len(recorder.all(ROOT)) == 1
    assert events(recorder.one(ROOT)) == []
