"""The requests that a worker serves: one task each, found by (request_id, attempt).

Cancelling the task is the one way to end a request early, whatever the reason: an Abort, the
router's disappearance, the deadline, shutdown. The task's `finally` frees what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from baton.v1 import worker_pb2
from core.errors import Cancelled, DeadlineExceeded, from_exception, to_detail
from core.tasks import TaskSet
from core.tracing import Span
from worker.outputs import OutputHub

RequestKey = tuple[str, int]
"""(request_id, attempt)."""

REMEMBER_S = 60.0
"""How long what has ended is known as such; no message is on its way for longer."""


def key_of(dispatch: worker_pb2.Dispatch) -> RequestKey:
    """The key of one attempt at a request."""
    return (dispatch.request_id, dispatch.attempt)


class Traced(Protocol):
    """What a service keeps of a request has the span of this worker's part in it."""

    @property
    def span(self) -> Span: ...


State = TypeVar("State", bound=Traced)
Work = Callable[[State], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class _Entry(Generic[State]):
    dispatch: worker_pb2.Dispatch
    state: State
    task: asyncio.Task[None]

    def cancel(self, reason: str) -> None:
        self.state.span.cancel(reason)
        self.task.cancel()


class RequestTable(Generic[State]):
    """Starts, finds and aborts requests; `State` is what the service keeps for each."""

    def __init__(self, hub: OutputHub, tasks: TaskSet, clock: Callable[[], float]) -> None:
        self._hub = hub
        self._tasks = tasks
        self._clock = clock
        self._entries: dict[RequestKey, _Entry[State]] = {}
        self._aborted_early: dict[RequestKey, float] = {}
        """Aborts that came before their dispatch, and when they may be forgotten."""
        self._ended: dict[RequestKey, float] = {}
        """Requests that ran or were refused, and when they may be forgotten."""
        self._awaited: dict[RequestKey, set[asyncio.Future[None]]] = {}
        """Who waits for a dispatch to be here, or not to come."""

    def get(self, key: RequestKey) -> State | None:
        """The state of a running request."""
        entry = self._entries.get(key)
        # The entry outlives its task by a turn of the event loop; what is begun for a request
        # whose `finally` has run would be nobody's.
        return entry.state if entry is not None and not entry.task.done() else None

    async def arrived(self, key: RequestKey, timeout_s: float) -> State | None:
        """As `get`, of a request whose dispatch may still be on its way.

        None when it is over, was aborted, or does not come in time.
        """
        if key not in self._entries and key not in self._ended and key not in self._aborted_early:
            waiters = self._awaited.setdefault(key, set())
            waiter = asyncio.get_running_loop().create_future()
            waiters.add(waiter)
            try:
                await asyncio.wait({waiter}, timeout=timeout_s)
            finally:
                waiters.discard(waiter)
                if not waiters:
                    self._awaited.pop(key, None)
        return self.get(key)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[State]:
        """The states of all requests that are not over."""
        return (entry.state for entry in self._entries.values())

    def start(self, dispatch: worker_pb2.Dispatch, state: State, work: Work[State]) -> None:
        """Runs `work(state)` until it ends, fails, is aborted or the dispatch's time is over.

        A failure is published to the dispatch's router. A repeated dispatch starts nothing,
        also when the request has ended. Raises Cancelled when it was aborted already.
        """
        key = key_of(dispatch)
        if key in self._entries or key in self._ended:
            state.span.cancel("repeated")
            return
        if self._aborted_early.pop(key, None) is not None:
            state.span.cancel("aborted early")
            raise Cancelled("the request was aborted before it arrived")
        task = self._tasks.start(self._run(dispatch, state, work))
        self._entries[key] = _Entry(dispatch, state, task)
        task.add_done_callback(lambda _: self._note_end(key))
        self._tell_arrival(key)

    def refused(self, key: RequestKey) -> None:
        """Its dispatch was here and could not be taken: who waits for it need not."""
        self._ended[key] = self._clock() + REMEMBER_S
        self._tell_arrival(key)

    def _tell_arrival(self, key: RequestKey) -> None:
        for waiter in self._awaited.pop(key, ()):
            waiter.set_result(None)

    def _note_end(self, key: RequestKey) -> None:
        del self._entries[key]
        self._ended[key] = self._clock() + REMEMBER_S

    async def _run(self, dispatch: worker_pb2.Dispatch, state: State, work: Work[State]) -> None:
        try:
            with state.span:
                await _in_time(dispatch.timeout_s, work(state))
        except Exception as error:
            self._publish_error(dispatch, error)

    def fail(self, key: RequestKey, error: Exception) -> None:
        """Ends a request and tells its router why; nothing for an unknown key."""
        entry = self._entries.get(key)
        if entry is not None:
            self._publish_error(entry.dispatch, error)
            entry.state.span.end(error)
            entry.task.cancel()

    def fail_where(self, is_meant: Callable[[State], bool], error: Exception) -> None:
        """Ends every request whose state `is_meant` picks."""
        for key, entry in list(self._entries.items()):
            if is_meant(entry.state):
                self.fail(key, error)

    def _publish_error(self, dispatch: worker_pb2.Dispatch, error: Exception) -> None:
        output = worker_pb2.SequenceOutput(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            error=to_detail(from_exception(error)),
        )
        self._hub.publish(dispatch.router_id, output)

    def abort(self, key: RequestKey, reason: str = "aborted by the router") -> None:
        """Ends a request; that an unknown one was aborted is remembered for a while.

        `reason` is for its trace.
        """
        entry = self._entries.get(key)
        if entry is None:
            self._aborted_early[key] = self._clock() + REMEMBER_S
            self._tell_arrival(key)
        else:
            entry.cancel(reason)

    def abort_router(self, router_id: str) -> None:
        """Ends everything that one router has dispatched."""
        for entry in list(self._entries.values()):
            if entry.dispatch.router_id == router_id:
                entry.cancel("the router has left")

    def forget_old(self) -> None:
        """Drops what is remembered only for a while."""
        now = self._clock()
        self._aborted_early = {k: t for k, t in self._aborted_early.items() if t > now}
        self._ended = {k: t for k, t in self._ended.items() if t > now}


async def _in_time(timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises DeadlineExceeded when `work` takes longer; 0 is no limit."""
    try:
        async with asyncio.timeout(timeout_s or None):
            await work
    except TimeoutError:
        raise DeadlineExceeded("the request's time is over") from None
