"""One thread with a queue: the shape of everything in this package that may block.

A transport backend is confined to such a thread, so it needs no locks; the event loop only
posts jobs. A thread with nothing to do waits on its queue and does not wake.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from core.errors import TransferError

T = TypeVar("T")


def never() -> None:
    """The tick of a thread that has only its jobs to do."""


class JobThread:
    """Runs jobs in order.

    `tick` runs after every job and, when it returned a number of seconds, again after that
    long without a job; None means to wait for the next job.
    """

    def __init__(self, name: str, tick: Callable[[], float | None] = never) -> None:
        self._tick = tick
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether a job posted now will be run."""
        return self._thread.ident is not None and not self._is_stopped

    def start(self) -> None:
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queues `job`, which must not raise. Never blocks."""
        self._jobs.put(job)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the thread and returns or raises what it does.

        Cancelling the wait withdraws a call that has not begun. Raises TransferError when
        the thread does not run.
        """
        if not self.is_running:
            raise TransferError("the transport does not run")
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def job() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(function())
            except Exception as error:
                outcome.set_exception(error)

        self.post(job)
        return await asyncio.wrap_future(outcome)

    async def stop(self) -> None:
        """Ends the thread after the jobs already queued and waits for it."""
        if self.is_running:
            self._is_stopped = True
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        timeout_s: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=timeout_s)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                job()
            timeout_s = self._tick()
