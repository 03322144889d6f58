"""The table of requests: what starts, what is found, what is remembered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from baton.v1 import types_pb2, worker_pb2
from core.errors import Cancelled
from core.tasks import TaskSet
from core.tracing import NO_SPAN, Span
from worker.outputs import OutputHub
from worker.requests import REMEMBER_S, RequestTable

DISPATCH = worker_pb2.Dispatch(request_id="r1", attempt=1, router_id="router")
KEY = ("r1", 1)


async def until_over() -> None:
    """A few turns of the event loop: a task's start, its end, and what follows from that."""
    for _ in range(5):
        await asyncio.sleep(0)


@dataclass
class State:
    name: str
    span: Span = NO_SPAN


class Bench:
    """A table whose requests note that they started and end at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[str] = []
        load = (types_pb2.Load(), types_pb2.WORKER_STATE_READY)
        hub = OutputHub(lambda: load, lambda _: None)
        self.table: RequestTable[State] = RequestTable(hub, TaskSet(), lambda: self.now)

    async def run(self, name: str) -> None:
        self.table.start(DISPATCH, State(name), self._work)
        await until_over()

    async def _work(self, state: State) -> None:
        self.started.append(state.name)


async def test_a_dispatch_that_comes_again_after_its_request_ended_starts_nothing() -> None:
    bench = Bench()
    await bench.run("first")
    await bench.run("again")
    assert bench.started == ["first"]


async def test_ends_and_early_aborts_are_forgotten_in_the_end() -> None:
    bench = Bench()
    await bench.run("first")
    bench.table.abort(("r2", 1))
    bench.now = REMEMBER_S + 1
    bench.table.forget_old()
    await bench.run("second")
    assert bench.started == ["first", "second"]


async def test_an_abort_that_overtakes_its_dispatch_refuses_it() -> None:
    bench = Bench()
    bench.table.abort(KEY)
    with pytest.raises(Cancelled):
        await bench.run("late")


async def test_a_request_is_not_found_any_more_in_the_turn_in_which_its_task_ended() -> None:
    bench = Bench()
    found: list[State | None] = []
    state = State("state")

    async def work(_: State) -> None:
        found.append(bench.table.get(KEY))
        asyncio.get_running_loop().call_soon(lambda: found.append(bench.table.get(KEY)))

    bench.table.start(DISPATCH, state, work)
    await until_over()
    assert found == [state, None]


async def waiting_for(bench: Bench, key: tuple[str, int]) -> asyncio.Task[State | None]:
    task = asyncio.ensure_future(bench.table.arrived(key, 60))
    await until_over()
    assert not task.done()
    return task


async def test_who_asks_before_the_dispatch_is_here_waits_for_it() -> None:
    bench, state = Bench(), State("state")
    first, second = await waiting_for(bench, KEY), await waiting_for(bench, KEY)
    first.cancel()
    third = await waiting_for(bench, KEY)
    await until_over()
    bench.table.start(DISPATCH, state, lambda _: asyncio.sleep(60))
    assert [await second, await third] == [state, state]
    bench.table.abort(KEY)


async def test_who_asks_for_what_was_aborted_before_it_came_need_not_wait() -> None:
    bench = Bench()
    early = await waiting_for(bench, KEY)
    bench.table.abort(KEY)
    assert await early is None
    assert await bench.table.arrived(KEY, 60) is None


async def test_what_has_ended_is_not_waited_for_nor_what_does_not_come_in_time() -> None:
    bench = Bench()
    await bench.run("first")
    assert await bench.table.arrived(KEY, 60) is None
    assert await bench.table.arrived(("other", 1), 0.01) is None


async def test_who_asks_for_what_was_refused_need_not_wait() -> None:
    bench = Bench()
    early = await waiting_for(bench, KEY)
    bench.table.refused(KEY)
    assert await early is None
    assert await bench.table.arrived(KEY, 60) is None
