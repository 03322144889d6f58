"""The loop alone, with a device that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from engine.batch import SequenceUpdate, StepBatch, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.builders import EOS, make_scheduler, make_sequence, result_of
from worker.engine_loop import EngineLoop
from worker.metrics import WorkerCounters


class Device:
    """Samples `tokens` one after the other, each step when `may_run` lets it."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.may_run = threading.Semaphore(0)
        self.fails_at: int | None = None
        self.num_steps = 0

    def launch(self, batch: StepBatch, after_layer: Any = None) -> StepResult:
        assert self.may_run.acquire(timeout=30)
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("device lost")
        return result_of(batch, self.tokens.pop(0))


class LateDevice(Device):
    """Launches at once and lets the result wait."""

    def launch(self, batch: StepBatch, after_layer: Any = None) -> Any:
        self.num_steps += 1
        return LateResult(self, batch)


class LateResult:
    def __init__(self, device: Device, batch: StepBatch) -> None:
        self._device, self._batch = device, batch

    def wait(self) -> StepResult:
        assert self._device.may_run.acquire(timeout=30)
        return result_of(self._batch, self._device.tokens.pop(0))


class Observer:
    def __init__(self) -> None:
        self.num_scheduled = 0
        self.tokens: list[int] = []
        self.failed: list[str] = []

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        self.num_scheduled += 1
        return frozenset()

    def on_updates(self, updates: list[SequenceUpdate], batch: StepBatch, elapsed_s: float) -> None:
        self.tokens += [update.token.token_id for update in updates if update.token]

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        self.failed.append(sequence.request_id)

    def on_layers(self, batch: StepBatch, num_layers: int) -> None: ...
    def on_preempted(self, sequences: list[Sequence]) -> None: ...


@asynccontextmanager
async def running(
    device: Device, *sequences: Sequence, is_async: bool = True
) -> AsyncIterator[tuple[Scheduler, Observer]]:
    scheduler, observer = make_scheduler(), Observer()
    with ThreadPoolExecutor(1) as thread:
        counters = WorkerCounters()
        loop = EngineLoop(scheduler, device, thread, lambda: None, counters, is_async=is_async)
        for sequence in sequences:
            loop.add(sequence)
        task = asyncio.ensure_future(loop.run(observer))
        try:
            yield scheduler, observer
        finally:
            device.may_run.release(100)
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_next_step_is_planned_while_one_is_computed() -> None:
    device = Device(7, 8, 9)
    async with running(device, make_sequence("a", 6, max_tokens=3)) as (scheduler, observer):
        await until(lambda: observer.num_scheduled == 2)
        assert observer.tokens == []
        device.may_run.release()
        await until(lambda: observer.tokens == [7] and observer.num_scheduled == 3)
        device.may_run.release(2)
        await until(lambda: not scheduler.has_work)
        assert observer.tokens == [7, 8, 9] and device.num_steps == 3


async def test_without_it_a_step_is_planned_when_the_one_before_is_over() -> None:
    device = Device(7, 8)
    sequence = make_sequence("a", 6, max_tokens=2)
    async with running(device, sequence, is_async=False) as (_, observer):
        await until(lambda: observer.num_scheduled == 1)
        device.may_run.release()
        await until(lambda: observer.num_scheduled == 2)
        assert observer.tokens == [7]


async def test_what_is_computed_behind_an_end_is_never_told() -> None:
    device = Device(EOS, 8)
    async with running(device, make_sequence("a", 6)) as (scheduler, observer):
        device.may_run.release(2)
        await until(lambda: device.num_steps == 2 and scheduler.audit() == [])
        await until(lambda: scheduler._pool.stats().referenced == 0)
        assert observer.tokens == [EOS] and observer.failed == []


async def test_a_step_that_fails_ends_its_sequences_and_not_those_of_the_step_behind_it() -> None:
    device = Device(7, 8, 9)
    device.fails_at = 2
    async with running(device, make_sequence("a", 6)) as (scheduler, observer):
        await until(lambda: observer.num_scheduled == 2)
        scheduler.add(make_sequence("b", 5, max_tokens=2))
        device.may_run.release()
        await until(lambda: observer.num_scheduled == 3)
        device.may_run.release(3)
        await until(lambda: not scheduler.has_work)
        assert observer.failed == ["a"] and observer.tokens == [7, 8, 9]


async def test_two_steps_are_launched_before_the_first_result_is_there() -> None:
    device = LateDevice(7, 8)
    async with running(device, make_sequence("a", 6, max_tokens=2)) as (scheduler, observer):
        await until(lambda: device.num_steps == 2)
        assert observer.tokens == []
        device.may_run.release(2)
        await until(lambda: not scheduler.has_work)
        assert observer.tokens == [7, 8]
