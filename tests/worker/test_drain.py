"""A worker that is told to leave takes no new work and loses none of what it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.rpc import open_channel
from tests.engine.harness import make_prompt
from tests.worker.pair import Worker, pair
from tests.worker.reads import StuckPull, until
from worker.drain import drain

pytestmark = pytest.mark.usefixtures("scheduling")

SERVING = health_pb2.HealthCheckResponse.ServingStatus


async def begin_drain(subject: Worker, grace_s: float) -> asyncio.Task[None]:
    task = asyncio.ensure_future(drain(subject.host, grace_s))
    await until(lambda: subject.host.state == types_pb2.WORKER_STATE_DRAINING)
    return task


async def health_of(subject: Worker) -> int:
    async with open_channel(subject.address.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


async def test_a_draining_worker_is_not_serving_and_refuses_new_work(folder: Path) -> None:
    async with pair(folder) as both:
        await (await begin_drain(both.decode, 5.0))
        assert await health_of(both.decode) == SERVING.NOT_SERVING
        with pytest.raises(Unavailable, match="takes no new requests"):
            await both.send(both.dispatch(make_prompt(20), "late"))


async def test_decode_finishes_what_it_has(folder: Path) -> None:
    async with pair(folder) as both:
        right = await both.generate(make_prompt(40), "before", max_tokens=60)
        result = await both.send(both.dispatch(make_prompt(40), "runs", max_tokens=60))
        await both.until_decoding()
        await (await begin_drain(both.decode, 30.0))
        await asyncio.wait_for(result.ended.wait(), 30)
        assert result.output == right.output
        assert result.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_prefill_waits_until_decode_has_read_its_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        stuck = StuckPull()
        monkeypatch.setattr(both.decode.host.transport, "pull", lambda *_: stuck)
        await both.send(both.dispatch(make_prompt(40), "slow"))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        draining = await begin_drain(both.prefill, 30.0)
        await asyncio.sleep(0.5)
        assert not draining.done()
        both.abort("slow")
        stuck.may_settle.set()
        await asyncio.wait_for(draining, 30)
        assert both.prefill.load.exports == 0


async def test_decode_gives_back_what_it_cannot_finish_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        stuck = StuckPull()
        monkeypatch.setattr(both.decode.host.transport, "pull", lambda *_: stuck)
        result = await both.send(both.dispatch(make_prompt(40), "slow"))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        draining = await begin_drain(both.decode, 1.0)
        await asyncio.wait_for(result.ended.wait(), 30)
        assert (result.was_preempted, result.error) == (True, None)
        stuck.may_settle.set()
        await draining


async def test_what_was_generated_before_a_hand_over_has_been_sent(folder: Path) -> None:
    async with pair(folder) as both:
        right = await both.generate(make_prompt(40), "before", max_tokens=100)
        results = await both.send_choices(
            both.dispatch(make_prompt(40), "runs", max_tokens=100, n=2)
        )
        await both.until_decoding()
        both.decode.host.service.hand_over()
        async with asyncio.timeout(30):
            for result in results:
                await result.ended.wait()
        assert all(result.was_preempted for result in results)
        assert both.decode.host.counters.num_given_back == 2
        first = results[0].output
        assert first == right.output[: len(first)]


async def test_without_a_grace_nothing_is_waited_for(folder: Path) -> None:
    async with pair(folder) as both:
        await drain(both.decode.host, 0.0)
        assert both.decode.host.state == types_pb2.WORKER_STATE_READY


async def test_a_quarantine_that_ends_does_not_undo_a_drain(folder: Path) -> None:
    async with pair(folder) as both:
        host = both.decode.host
        await (await begin_drain(both.decode, 5.0))
        host._is_exhausted = True
        await host._check_quarantine()
        assert host.state == types_pb2.WORKER_STATE_DRAINING
