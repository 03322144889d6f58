"""The loop that turns waiting sequences into tokens: schedule → execute → postprocess.

Scheduling and postprocessing run on the event loop, `launch` in the device thread; so
bookkeeping needs no locks, and the event loop stays free while a step computes.

With `is_async` the next step is planned and waits in the device thread's queue while one is
computed: between two steps the device waits neither for the event loop nor for what is told of
the first (engine.flights says what that assumes).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from core.errors import InternalError
from core.logs import event
from engine.batch import (
    PendingResult,
    SequenceUpdate,
    StepBatch,
    StepResult,
    broken_sequences,
)
from engine.graphs import GraphKey
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceKey
from worker.metrics import WorkerCounters

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The device side of a step."""

    def launch(
        self, batch: StepBatch, after_layer: Callable[[int], None] | None = None
    ) -> StepResult | PendingResult: ...


class StepObserver(Protocol):
    """The service's part in a step. All calls come on the event loop and never block it."""

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        """Blocks of the batch are allocated; nothing is computed yet.

        Returns after which numbers of layers `on_layers` shall be called.
        """

    def on_layers(self, batch: StepBatch, num_layers: int) -> None:
        """The step has written the KV of its first `num_layers` layers."""

    def on_preempted(self, sequences: list[Sequence]) -> None:
        """These lost their blocks to others, and wait to be computed again."""

    def on_updates(self, updates: list[SequenceUpdate], batch: StepBatch, elapsed_s: float) -> None:
        """A step is done, which took the device so long; finished sequences do not have their
        blocks any more."""

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        """The device failed in a step with this sequence, which is gone."""


@dataclass(frozen=True)
class _Step:
    """A step in the device thread or its queue."""

    batch: StepBatch
    launched: asyncio.Future[StepResult | PendingResult]
    queued_at: float


class EngineLoop:
    """Runs steps while there is work and sleeps without waking otherwise."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        device: ThreadPoolExecutor,
        after_step: Callable[[], None],
        counters: WorkerCounters,
        *,
        is_async: bool,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._device = device
        self._after_step = after_step
        self._counters = counters
        self._is_async = is_async
        self._last_end = 0.0
        self._wakeup = asyncio.Event()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose tokens have to be computed."""
        self.scheduler.add(sequence)
        self._wakeup.set()

    def add_computed(self, sequence: Sequence) -> None:
        """Takes over a sequence whose KV is in place (see Scheduler.add_computed)."""
        self.scheduler.add_computed(sequence)
        self._wakeup.set()

    def add_allocated(self, sequence: Sequence) -> None:
        """Takes over a sequence with its blocks (see Scheduler.add_allocated)."""
        self.scheduler.add_allocated(sequence)
        self._wakeup.set()

    def abort(self, key: SequenceKey) -> None:
        """Drops a sequence; its blocks are free at once or when the steps in hand end."""
        self.scheduler.abort(key)
        self.wake()

    def wake(self) -> None:
        """Looks for work again: room may have become free."""
        self._wakeup.set()

    async def run(self, observer: StepObserver) -> None:
        """Runs until cancelled."""
        step: _Step | None = None
        while True:
            if step is None:
                step = self._next(observer)
            if step is None:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            ahead = self._ahead(observer)
            try:
                await self._finish(step, observer)
            except asyncio.CancelledError:
                if ahead is not None:
                    ahead.launched.cancel()
                raise
            step = ahead
            self._after_step()

    def _next(self, observer: StepObserver) -> _Step | None:
        batch = self.scheduler.schedule()
        if preempted := self.scheduler.take_preempted():
            self._counters.num_preempted += len(preempted)
            observer.on_preempted(preempted)
        return None if batch is None else self._launch(batch, observer)

    def _ahead(self, observer: StepObserver) -> _Step | None:
        batch = self.scheduler.schedule_ahead() if self._is_async else None
        return None if batch is None else self._launch(batch, observer)

    def _launch(self, batch: StepBatch, observer: StepObserver) -> _Step:
        loop = asyncio.get_running_loop()
        boundaries = observer.on_scheduled(batch)

        def after_layer(num_layers: int) -> None:
            if num_layers in boundaries:
                loop.call_soon_threadsafe(observer.on_layers, batch, num_layers)

        hook = after_layer if boundaries else None
        launched = loop.run_in_executor(self._device, self._runner.launch, batch, hook)
        return _Step(batch, launched, loop.time())

    async def _finish(self, step: _Step, observer: StepObserver) -> None:
        batch = step.batch
        try:
            result = await step.launched
            if not isinstance(result, StepResult):
                result = await asyncio.to_thread(result.wait)
        except Exception as error:
            event(logger, logging.ERROR, "step_failed", num_sequences=len(batch.sequences))
            logger.exception("step failed")
            self._fail(batch, observer, error)
            return
        elapsed_s = self._elapsed_s(step)
        broken = broken_sequences(batch, result)
        for sequence in broken:
            self.scheduler.abort(sequence.key)
        updates = self.scheduler.postprocess(batch, result)
        self._count(batch, updates, elapsed_s)
        self._count_graph(result.graph)
        observer.on_updates(updates, batch, elapsed_s)
        for sequence in broken:
            observer.on_failed(sequence, InternalError("the model's logits are not finite"))

    def _elapsed_s(self, step: _Step) -> float:
        """What the step that has just ended took, which began when the one before it ended."""
        began_at = max(step.queued_at, self._last_end)
        self._last_end = asyncio.get_running_loop().time()
        return self._last_end - began_at

    def _count(self, batch: StepBatch, updates: list[SequenceUpdate], elapsed_s: float) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.step_s += elapsed_s
        counters.num_step_tokens += batch.num_tokens
        counters.num_sampled_tokens += sum(update.token is not None for update in updates)

    def _count_graph(self, key: GraphKey | None) -> None:
        labels = ("NONE", "") if key is None else (key.mode.value, str(key.size))
        self._counters.graph_dispatches[labels] += 1

    def _fail(self, batch: StepBatch, observer: StepObserver, error: Exception) -> None:
        sequences = [s for item in batch.sequences if not (s := item.sequence).is_finished]
        for sequence in sequences:
            self.scheduler.abort(sequence.key)
        self.scheduler.postprocess(batch, StepResult((None,) * len(batch.sequences)))
        for sequence in sequences:
            observer.on_failed(sequence, error)
