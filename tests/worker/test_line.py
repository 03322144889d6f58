"""Requests that wait, at prefill for their turn or on decode for room, and end meanwhile."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.batch import StepBatch
from engine.runner import ModelRunner
from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, pair
from tests.worker.reads import until


@asynccontextmanager
async def full_decode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **prefill: object
) -> AsyncIterator[Pair]:
    """Decode has no free block while the context lasts, and nobody looks every second."""
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 60)
    async with pair(folder, prefill=prefill, decode={"num_gpu_blocks_override": 8}) as both:
        pool = both.decode.host.engine.pool
        blocks = pool.allocate(8)
        assert blocks is not None
        yield both
        pool.release(blocks)


async def test_a_request_that_decode_ends_leaves_the_line_and_prefill_hears_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_decode(folder, monkeypatch) as both:
        result = await both.send(both.dispatch(make_prompt(40), "waiting"))
        await until(lambda: both.decode.load.queue_depth == 1)
        both.decode.host.service.abort(("waiting", 1))
        await until(lambda: result.error is not None)
        assert "ended while it waited for room" in str(result.error)
        assert both.decode.load.queue_depth == 0


async def test_a_request_that_prefill_ends_leaves_the_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_decode(folder, monkeypatch) as both:
        await both.send(both.dispatch(make_prompt(40), "waiting"))
        await until(lambda: both.decode.load.queue_depth == 1)
        both.prefill.host.service.abort(("waiting", 1))
        await until(lambda: both.decode.load.queue_depth == 0)
        both.decode.host.service.abort(("waiting", 1))


async def test_a_grant_that_is_given_up_makes_room_for_the_next_in_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 60)
    async with pair(folder, decode={"num_gpu_blocks_override": 8}) as both:
        # Prefill computes nothing, so that both hand-offs end where they begin.
        monkeypatch.setattr(both.prefill.host.loop, "add", lambda _: None)
        await both.send(both.dispatch(make_prompt(100), "granted"))
        await until(lambda: both.decode.load.imports == 1)
        await both.send(both.dispatch(make_prompt(90), "next"))
        await until(lambda: both.decode.load.queue_depth == 1)
        both.abort("granted")
        await until(lambda: both.decode.load.queue_depth == 0)
        assert both.decode.load.blocks.referenced == 6
        both.abort("next")


CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
"""Prompts of 128 tokens in all may be ahead of what is being computed."""


async def test_a_request_that_ends_before_its_turn_lets_the_next_one_ask_for_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full_decode(folder, monkeypatch, **CHUNKS) as both:
        for name in ("first", "second"):
            await both.send(both.dispatch(make_prompt(100), name))
        await until(lambda: both.decode.load.queue_depth == 1)
        await until(lambda: both.prefill.load.queue_depth == 1)
        both.abort("first")
        await until(lambda: both.prefill.load.queue_depth == 0)
        await until(lambda: both.decode.load.queue_depth == 1)
        both.abort("second")


async def test_the_next_prompt_gets_its_room_while_one_is_computed_and_an_end_stops_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.execute
    may_compute = threading.Event()
    steps = []

    def execute(self: ModelRunner, batch: StepBatch, after_layer: Any = None) -> Any:
        steps.append([item.sequence.request_id for item in batch.sequences])
        may_compute.wait(30)
        return runner(self, batch, after_layer)

    monkeypatch.setattr(ModelRunner, "execute", execute)
    async with pair(folder, prefill=CHUNKS) as both:
        for name in ("first", "second"):
            await both.send(both.dispatch(make_prompt(100), name))
        await until(lambda: both.decode.load.imports == 2)
        both.abort("first")
        both.abort("second")
        await until(lambda: both.prefill.load.requests == 0)
        may_compute.set()
        await both.until_idle()
        # What was on the device came to its end, and that was all.
        assert steps == [["first"]]


async def test_what_decode_gives_up_is_not_computed_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_compute = threading.Event()
    real_execute = ModelRunner.execute

    def execute(self: ModelRunner, batch: StepBatch, after_layer: Any = None) -> Any:
        may_compute.wait(30)
        return real_execute(self, batch, after_layer)

    monkeypatch.setattr(ModelRunner, "execute", execute)
    async with pair(folder) as both:
        result = await both.send(both.dispatch(make_prompt(100), "given-up"))
        await until(lambda: both.prefill.load.exports == 1)
        both.decode.host.service.abort(("given-up", 1))
        await until(lambda: result.error is not None)
        may_compute.set()
        assert "gave the hand-off up" in str(result.error)
