"""One thread with a queue: the shape of everything in this package that may block.

A transport backend is confined to such a thread, so it needs no locks; the event loop only
posts jobs. A thread with nothing to do waits on its queue and does not wake.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import selectors
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
        self._put(job)

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
            self._put(None)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        timeout_s: float | None = None
        while True:
            try:
                job = self._next_job(timeout_s)
            except queue.Empty:
                pass
            else:
                if job is None:
                    return
                job()
            timeout_s = self._tick()

    def _put(self, job: Callable[[], None] | None) -> None:
        """Hands the thread a job; None asks it to end."""
        self._jobs.put(job)

    def _next_job(self, timeout_s: float | None) -> Callable[[], None] | None:
        """Waits for what `_put` gave. Raises queue.Empty when it is time for a tick."""
        return self._jobs.get(timeout=timeout_s)


class WatchingThread(JobThread):
    """A JobThread whose `tick` runs also when a file descriptor becomes readable.

    Everything but the jobs and the tick is called on one thread, the event loop's.
    """

    def __init__(self, name: str, tick: Callable[[], float | None]) -> None:
        super().__init__(name, tick)
        self._selector = selectors.DefaultSelector()
        self._wake_fd: int | None = None

    def watch(self, fd: int) -> None:
        """From now on `tick` runs when `fd` is readable; called in a job."""
        self._selector.register(fd, selectors.EVENT_READ)

    def start(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        super().start()

    def _put(self, job: Callable[[], None] | None) -> None:
        super()._put(job)
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    async def stop(self) -> None:
        await super().stop()
        self._selector.close()
        if self._wake_fd is not None:
            os.close(self._wake_fd)
            self._wake_fd = None

    def _next_job(self, timeout_s: float | None) -> Callable[[], None] | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            self._wait(timeout_s)
        return self._jobs.get_nowait()

    def _wait(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wake_fd:
                os.eventfd_read(key.fd)
