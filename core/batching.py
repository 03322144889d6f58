"""Questions that are asked at about the same time, answered by one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Collects questions while a call is under way, and asks all of them with the next one.

    So an idle service answers at once, and a busy one makes few calls. `ask` returns one answer
    for each question; what it raises, everyone hears who waits by then. `cost` of the questions
    of one call adds up to `max_cost` at most, unless a single one exceeds it.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        cost: Callable[[Q], int],
        max_cost: int,
    ) -> None:
        self._ask = ask
        self._cost = cost
        self._max_cost = max_cost
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._asking: asyncio.Task[None] | None = None

    async def answer(self, question: Q) -> A:
        """Waits for its turn and for the answer. Raises what the call raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A] = loop.create_future()
        self._waiting.append((question, future))
        if self._asking is None:
            # It begins after all who are ready to run, so that those who ask now come along.
            self._asking = loop.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while batch := self._take():
                await self._answer(batch)
        finally:
            self._asking = None

    def _take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        """The next ones, less those that have been given up."""
        batch: list[tuple[Q, asyncio.Future[A]]] = []
        left = self._max_cost
        while self._waiting:
            question, future = self._waiting[0]
            if not future.done():
                left -= self._cost(question)
                if left < 0 and batch:
                    break
                batch.append((question, future))
            self._waiting.popleft()
        return batch

    async def _answer(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._ask([question for question, _ in batch])
        except Exception as error:
            for _, future in (*batch, *self._waiting):
                if not future.done():
                    future.set_exception(error)
            self._waiting.clear()
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
