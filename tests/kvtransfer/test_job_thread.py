"""A transport's thread: runs jobs in order, ticks when it should, and else sleeps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from core.errors import TransferError
from kvtransfer.job_thread import WatchingThread
from tests.kvtransfer.readers import PROMPT_S


class Ticks:
    """Counts them; each asks for another one after `pause_s`."""

    def __init__(self) -> None:
        self.count = 0
        self.pause_s: float | None = None

    def __call__(self) -> float | None:
        self.count += 1
        return self.pause_s


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture
async def thread(ticks: Ticks) -> AsyncIterator[WatchingThread]:
    thread = WatchingThread("kv-test", ticks)
    thread.start()
    yield thread
    await thread.stop()


async def another_tick(ticks: Ticks) -> None:
    before = ticks.count
    async with asyncio.timeout(PROMPT_S):
        while ticks.count == before:
            await asyncio.sleep(0.005)


async def until_asleep(ticks: Ticks) -> None:
    """What was asked of it may make it tick once more, at any time."""
    async with asyncio.timeout(PROMPT_S):
        before = -1
        while ticks.count != before:
            before = ticks.count
            await asyncio.sleep(0.05)


async def test_jobs_run_in_order(thread: WatchingThread) -> None:
    order: list[int] = []
    for number in range(100):
        thread.post(lambda number=number: order.append(number))  # type: ignore[misc]
    await thread.call(lambda: None)
    assert order == list(range(100))


async def test_a_call_raises_what_the_function_raises(thread: WatchingThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)


async def test_a_watched_file_makes_it_tick(thread: WatchingThread, ticks: Ticks) -> None:
    read_end, write_end = os.pipe()
    await thread.call(lambda: thread.watch(read_end))
    await until_asleep(ticks)
    os.write(write_end, b"x")
    await another_tick(ticks)
    await thread.stop()
    os.close(read_end)
    os.close(write_end)


async def test_it_ticks_again_after_the_pause(thread: WatchingThread, ticks: Ticks) -> None:
    ticks.pause_s = 0.01
    await thread.call(lambda: None)
    await another_tick(ticks)
    await another_tick(ticks)


async def test_after_the_stop_calls_are_refused_and_posts_do_nothing(
    thread: WatchingThread,
) -> None:
    await thread.stop()
    thread.post(lambda: None)
    with pytest.raises(TransferError, match="does not run"):
        await thread.call(lambda: None)
