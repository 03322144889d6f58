"""core/batching.py: who shares a call, in what order, and what failures do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from core.batching import Batcher


class Service:
    """Doubles numbers. Calls wait for `gate`; `calls` has what each was asked."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.batcher = Batcher(self.ask, cost=lambda number: number, max_cost=10)

    async def ask(self, numbers: Sequence[int]) -> list[int]:
        self.calls.append(list(numbers))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [2 * number for number in numbers]

    def start(self, number: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.batcher.answer(number))


@pytest.fixture
async def service():
    return Service()


async def turns():
    for _ in range(4):
        await asyncio.sleep(0)


async def test_questions_of_one_turn_share_a_call(service):
    service.gate.set()
    assert await asyncio.gather(*map(service.start, [1, 2, 3])) == [2, 4, 6]
    assert service.calls == [[1, 2, 3]]


async def test_those_that_come_during_a_call_share_the_next_one(service):
    first = service.start(1)
    await turns()
    others = [service.start(2), service.start(3)]
    await turns()
    assert service.calls == [[1]]
    service.gate.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6]
    assert service.calls == [[1], [2, 3]]


async def test_a_call_asks_no_more_than_its_cost_allows_but_for_a_single_question(service):
    service.gate.set()
    await asyncio.gather(*map(service.start, [4, 6, 1, 99, 5]))
    assert service.calls == [[4, 6], [1], [99], [5]]


async def test_what_nobody_waits_for_any_more_is_not_asked(service):
    first = service.start(1)
    await turns()
    given_up, kept = service.start(2), service.start(3)
    await turns()
    given_up.cancel()
    await turns()
    service.gate.set()
    assert await asyncio.gather(first, kept) == [2, 6]
    assert service.calls == [[1], [3]]


async def test_a_failure_reaches_all_who_wait_and_the_next_call_starts_anew(service):
    service.error = ValueError("down")
    first = service.start(1)
    await turns()
    second = service.start(2)
    await turns()
    service.gate.set()
    for task in (first, second):
        with pytest.raises(ValueError, match="down"):
            await task
    assert service.calls == [[1]]
    service.error = None
    assert await service.start(3) == 6
