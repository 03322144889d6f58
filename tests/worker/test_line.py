"""Requests that end while they wait for room on decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, pair


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def full_decode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Decode has no free block while the context lasts, and nobody looks every second."""
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 60)
    async with pair(folder, decode={"num_gpu_blocks_override": 8}) as both:
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
        await asyncio.wait_for(result.ended.wait(), 30)
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
