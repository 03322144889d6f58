"""What the workers record of a request, with real ones and a small random model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from baton.v1 import worker_pb2
from tests.engine.harness import make_prompt
from tests.traces import CALLER, CALLER_ID, TRACE_ID, Recorder, events, parent_id, trace_id
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, pair
from tests.worker.prefixes import held_by, two_pairs
from tests.worker.reads import until

HANDED_OFF = {
    "prefill": "",
    "prefill.queue": "prefill",
    "prefill.compute": "prefill",
    "prefill.export": "prefill",
    "decode": "",
    "decode.wait": "decode",
    "decode.transfer": "decode",
    "decode.generate": "decode",
}


def record(*pairs: Pair) -> Recorder:
    """Gets the spans of all workers of `pairs` from now on; none begins a trace."""
    recorder = Recorder(sampling_ratio=0.0)
    for both in pairs:
        both.prefill.host.tracer = both.decode.host.tracer = recorder.tracer
    return recorder


async def test_a_hand_off_has_one_span_for_each_part_of_it(folder: Path) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        await both.generate(make_prompt(40), "r", traceparent=CALLER)
        await both.until_idle()
    assert recorder.parents == HANDED_OFF
    assert {trace_id(span) for span in recorder.spans} == {TRACE_ID}
    for name in ("prefill", "decode"):
        assert parent_id(recorder.one(name)) == CALLER_ID
        assert recorder.one(name).kind is SpanKind.SERVER
        assert recorder.told(name) == {
            "baton.request_id": "r",
            "baton.attempt": 1,
            "baton.prompt_tokens": 40,
            "baton.prior_output_tokens": 0,
        }


async def test_the_parts_say_what_happened_and_how_much_of_it(folder: Path) -> None:
    small_steps: dict[str, object] = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    async with pair(folder, prefill=small_steps) as both:
        recorder = record(both)
        await both.generate(make_prompt(40), "r", traceparent=CALLER)
        await both.until_idle()
        block_bytes = both.decode.host.engine.kv_cache.block_bytes
    assert events(recorder.one("prefill.queue")) == ["turn", "granted"]
    assert recorder.told("prefill.compute") == {"baton.cached_tokens": 0}
    chunks = recorder.one("prefill.compute").events
    assert [chunk.attributes["baton.computed_tokens"] for chunk in chunks] == [16, 32, 40]
    assert events(recorder.one("prefill")) == ["first_token"]
    assert events(recorder.one("prefill.export")) == ["announced"]
    assert recorder.told("prefill.export") == {"baton.blocks": 3, "baton.end_reason": "released"}
    assert events(recorder.one("decode")) == ["room_granted"]
    transfer = recorder.told("decode.transfer")
    assert transfer.pop("baton.exposed_s") > 0
    assert transfer == {
        "baton.transferred_blocks": 3,
        "baton.transferred_bytes": 3 * block_bytes,
    }
    assert recorder.told("decode.generate") == {
        "baton.computes_prompt": False,
        "baton.output_tokens": 8,
        "baton.end_reasons": ("length",),
    }


async def test_a_request_that_stays_on_decode_waits_and_is_generated_there(folder: Path) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        result = await both.send_local(both.dispatch(make_prompt(40), "r", traceparent=CALLER))
        async with asyncio.timeout(60):
            await result.ended.wait()
        await both.until_idle()
    assert recorder.parents == {"decode": "", "decode.queue": "decode", "decode.generate": "decode"}
    assert events(recorder.one("decode")) == ["first_token"]
    assert recorder.told("decode.generate") == {
        "baton.computes_prompt": True,
        "baton.output_tokens": 8,
        "baton.end_reasons": ("length",),
    }


async def test_a_dispatch_without_a_trace_records_nothing(folder: Path) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        await both.generate(make_prompt(40), "r")
        await both.until_idle()
    assert recorder.spans == []


async def test_an_abort_ends_every_open_span_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        go_on = hold_steps(both.decode, monkeypatch)
        await both.send(both.dispatch(make_prompt(40), "r", traceparent=CALLER))
        await both.until_decoding()
        # Then it cannot be prefill from which decode hears of the abort.
        await until(lambda: both.prefill.load.requests == 0)
        both.abort("r")
        await until(lambda: both.decode.load.requests == 0)
        go_on()
        await both.until_idle()
    assert recorder.parents == HANDED_OFF
    assert recorder.told("decode")["baton.end_reason"] == "aborted by the router"
    generated = recorder.told("decode.generate")
    assert generated["baton.end_reason"] == "cancelled"
    assert generated["baton.output_tokens"] == 1
    assert generated["baton.end_reasons"] == ()
    assert {span.status.status_code for span in recorder.spans} == {StatusCode.UNSET}


async def test_a_router_that_leaves_while_prefill_waits_is_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_asked = asyncio.Event()

    async def give_no_room(*_: object) -> None:
        has_asked.set()
        await asyncio.Event().wait()

    async with pair(folder) as both:
        recorder = record(both)
        hand_off = both.decode.host.service._hand_off  # type: ignore[attr-defined]
        monkeypatch.setattr(hand_off, "grant", give_no_room)
        await both.send(both.dispatch(make_prompt(40), "r", traceparent=CALLER))
        await has_asked.wait()
        # In one moment: who is told first would tell the other.
        for worker in (both.prefill, both.decode):
            worker.host.hub.close()
        await both.until_idle()
    for name in ("prefill", "decode"):
        assert recorder.told(name)["baton.end_reason"] == "the router has left"
    assert recorder.told("decode.wait") == {"baton.end_reason": "cancelled"}
    assert events(recorder.one("prefill.queue")) == ["turn"]


async def test_a_failed_read_is_the_transfer_s_error_and_the_export_is_revoked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        monkeypatch.setattr(both.decode.host.digests, "of", _other_digests)
        await both.generate(make_prompt(40), "r", traceparent=CALLER)
        await both.until_idle()
    transfer = recorder.one("decode.transfer")
    assert transfer.attributes["error.type"] == "UNAVAILABLE"
    assert "did not arrive as it was computed" in (transfer.status.description or "")
    assert recorder.one("decode").status.status_code is StatusCode.ERROR
    assert recorder.all("decode.generate") == []
    assert recorder.told("prefill.export")["baton.end_reason"] in ("released", "revoked")


async def _other_digests(blocks: list[int], part: object = None) -> list[int]:
    return [1 for _ in blocks]


async def test_when_the_first_token_is_the_last_decode_says_why_it_did_nothing(
    folder: Path,
) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        await both.generate(make_prompt(40), "r", max_tokens=1, traceparent=CALLER)
        await both.until_idle()
    assert recorder.told("prefill.export")["baton.end_reason"] == "revoked"
    assert recorder.told("decode")["baton.end_reason"] == "the first tokens were the last"
    assert recorder.one("prefill").status.status_code is StatusCode.UNSET
    assert "baton.end_reason" not in recorder.told("prefill")


async def test_a_request_handed_over_by_a_worker_that_drains_says_so(folder: Path) -> None:
    async with pair(folder) as both:
        recorder = record(both)
        await both.send(both.dispatch(make_prompt(40), "r", max_tokens=400, traceparent=CALLER))
        await both.until_decoding()
        both.decode.host.service.hand_over()
        await both.until_idle()
    assert recorder.told("decode")["baton.end_reason"] == "handed over"


async def test_what_comes_from_another_worker_s_cache_has_a_span(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(64)
    async with two_pairs(folder, monkeypatch) as (one, two):
        await one.generate(prompt, "first")
        recorder = record(one, two)
        source: worker_pb2.PrefixSource = held_by(one.prefill, 4)
        await two.generate(prompt, "again", source=source, traceparent=CALLER)
        await two.until_idle()
    assert recorder.parents == {**HANDED_OFF, "prefill.prefix_fetch": "prefill"}
    assert recorder.told("prefill.prefix_fetch") == {
        "baton.prefix_source": "p0",
        "baton.fetched_tokens": 48,
    }
    assert recorder.told("prefill.compute") == {"baton.cached_tokens": 48}
