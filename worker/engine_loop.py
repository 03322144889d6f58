"""The loop that turns waiting sequences into tokens: schedule → execute → postprocess.

Scheduling and postprocessing run on the event loop, `execute` in the device thread; so
bookkeeping needs no locks, and the event loop stays free while a step computes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from core.errors import InternalError
from core.logs import event
from engine.batch import SequenceUpdate, StepBatch, StepResult, broken_sequences
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceKey
from worker.metrics import WorkerCounters

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The device side of a step."""

    def execute(
        self, batch: StepBatch, after_layer: Callable[[int], None] | None = None
    ) -> StepResult: ...


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

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        """A step is done; finished sequences have released their blocks."""

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        """The device failed in a step with this sequence, which is gone."""


class EngineLoop:
    """Runs steps while there is work and sleeps without waking otherwise."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        device: ThreadPoolExecutor,
        after_step: Callable[[], None],
        counters: WorkerCounters,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._device = device
        self._after_step = after_step
        self._counters = counters
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
        """Drops a sequence; its blocks are free at once or when the current step ends."""
        self.scheduler.abort(key)
        self.wake()

    def wake(self) -> None:
        """Looks for work again: room may have become free."""
        self._wakeup.set()

    async def run(self, observer: StepObserver) -> None:
        """Runs until cancelled."""
        while True:
            batch = self.scheduler.schedule()
            if preempted := self.scheduler.take_preempted():
                self._counters.num_preempted += len(preempted)
                observer.on_preempted(preempted)
            if batch is None:
                self._wakeup.clear()
                await self._wakeup.wait()
                continue
            await self._step(batch, observer, observer.on_scheduled(batch))
            self._after_step()

    async def _step(
        self, batch: StepBatch, observer: StepObserver, boundaries: frozenset[int]
    ) -> None:
        loop = asyncio.get_running_loop()

        def after_layer(num_layers: int) -> None:
            if num_layers in boundaries:
                loop.call_soon_threadsafe(observer.on_layers, batch, num_layers)

        hook = after_layer if boundaries else None
        began_at = loop.time()
        try:
            result = await loop.run_in_executor(self._device, self._runner.execute, batch, hook)
        except Exception as error:
            event(logger, logging.ERROR, "step_failed", num_sequences=len(batch.sequences))
            logger.exception("step failed")
            self._fail(batch, observer, error)
            return
        self._count(batch, result, loop.time() - began_at)
        broken = broken_sequences(batch, result)
        for sequence in broken:
            self.scheduler.abort(sequence.key)
        observer.on_updates(self.scheduler.postprocess(batch, result))
        for sequence in broken:
            observer.on_failed(sequence, InternalError("the model's logits are not finite"))

    def _count(self, batch: StepBatch, result: StepResult, elapsed_s: float) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.step_s += elapsed_s
        counters.num_step_tokens += batch.num_tokens
        counters.num_sampled_tokens += len(result.tokens) - result.tokens.count(None)
        graph = result.graph
        labels = ("NONE", "") if graph is None else (graph.mode.value, str(graph.size))
        counters.graph_dispatches[labels] += 1

    def _fail(self, batch: StepBatch, observer: StepObserver, error: Exception) -> None:
        sequences = [item.sequence for item in batch.sequences]
        for sequence in sequences:
            self.scheduler.abort(sequence.key)
        self.scheduler.postprocess(batch, StepResult((None,) * len(sequences)))
        for sequence in sequences:
            observer.on_failed(sequence, error)
