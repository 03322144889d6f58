"""Background tasks that are neither lost nor silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first failure cancels the others, and is raised when they have ended.

    So does a cancellation, and another one that comes meanwhile goes on to them: nobody is left
    behind.

    An asyncio.TaskGroup's failure, and a cancellation that goes through one, hold themselves by
    its frames until the garbage collector looks for them.
    """
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        # Unlike `gather`, which comes when there is nothing left to wait for, it passes no
        # cancellation on: that is done below, once for each.
        await _until_one_fails(tasks)
        return await asyncio.gather(*tasks)
    finally:
        is_cancelled = False
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                task.cancel()
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                is_cancelled = True
        # A failure holds this frame, and its task the failure.
        tasks.clear()
        if is_cancelled:
            raise asyncio.CancelledError


async def _until_one_fails(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Or until all have ended. One that ends as cancelled has failed, too."""
    gathered = asyncio.gather(*tasks)
    # Who is cancelled here does not look at it any more; asyncio would complain.
    gathered.add_done_callback(lambda future: future.cancelled() or future.exception())
    await asyncio.wait([gathered])


class TaskSet:
    """Keeps a reference to each task until it ends, and logs what went wrong in it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `coroutine` in the background."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task failed", exc_info=error)

    async def cancel(self, grace_s: float) -> None:
        """Cancels every task; what they start while they end has `grace_s` before the same."""
        for task in list(self._tasks):
            task.cancel()
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._tasks:
            left_s = deadline - asyncio.get_running_loop().time()
            _, pending = await asyncio.wait(set(self._tasks), timeout=max(0.0, left_s))
            for task in pending:
                task.cancel()
