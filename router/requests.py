"""Requests in flight and lately finished, by the id that the client chose.

A second call of the same tenant with the same id and content joins the first: it gets
everything from the first token on. When the last of its callers leaves, a request is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.v1 import inference_pb2
from core.api_keys import DEFAULT_TENANT
from core.errors import AlreadyExists, Cancelled, DeadlineExceeded, Unavailable
from core.logs import event
from core.tracing import NO_CONTEXT, TraceContext
from router.follower import Follower
from router.generation import Generation
from router.request import RequestRun
from router.request_context import RequestContext
from router.request_spans import begin_request

logger = logging.getLogger(__name__)

REMEMBER_S = 60.0
MAX_REMEMBERED = 1024
MAX_REMEMBERED_TOKENS = 200_000

_Key = tuple[str, str, int]
"""Tenant, request id, and number of the prompt in its call."""


@dataclass(frozen=True)
class Part:
    """One prompt of a call that has several under one id; `content` is the whole call's."""

    request_id: str
    index: int
    content: bytes


def parts_of(request_id: str, requests: Sequence[inference_pb2.GenerateRequest]) -> list[Part]:
    """One for each of a call's `requests`, of which there are several."""
    content = b"".join([_digest(request) for request in requests])
    return [Part(request_id, index, content) for index in range(len(requests))]


@dataclass(frozen=True)
class _Claim:
    """What a call asks for: its key in the table, and what must be the same to join."""

    key: _Key
    digest: bytes


@dataclass(eq=False)
class _Entry:
    key: _Key
    run: RequestRun
    task: asyncio.Task[None]
    digest: bytes
    is_named: bool
    """Whether the client chose the id; only then can a second call come."""
    finished_at: float = 0.0


class RequestTable:
    """Runs requests. `Generation` is what they share.

    A client that leaves what there is unread for `max_unread_s` is given up.
    """

    def __init__(self, shared: Generation, max_unread_s: float) -> None:
        self._shared = shared
        self._max_unread_s = max_unread_s
        self._numbers = itertools.count()
        self._running: dict[_Key, _Entry] = {}
        self._finished: OrderedDict[_Key, _Entry] = OrderedDict()
        self._num_remembered_tokens = 0
        self._is_closed = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextmanager
    def follow(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        *,
        tenant: str = DEFAULT_TENANT,
        is_named: bool = True,
        trace: TraceContext = NO_CONTEXT,
        part: Part | None = None,
    ) -> Iterator[Follower]:
        """Follows the outputs of `request`, started now or joined. Raises AlreadyExists.

        `deadline` is in the event loop's time; of a call that joins, it ends what this call
        follows and not the request. `is_named` False: the id was drawn for this call, so that
        no second one can come. A request that this call starts goes on with its `trace`.
        Leaving the context gives the caller's interest up.
        """
        if self._is_closed:
            raise Unavailable("the router is shutting down")
        is_named = is_named and bool(request.request_id)
        claim = _claim(request, tenant, part) if is_named else None
        joined = self._join(claim) if claim is not None else None
        entry = joined or self._start(request, deadline, tenant, claim, trace)
        try:
            with entry.run.log.follow() as follower:
                if joined is None:
                    yield follower
                else:
                    with _ending_at(deadline, follower):
                        yield follower
        finally:
            if entry.run.log.num_followers == 0 and not entry.task.done():
                self._forget(entry)
                entry.run.end_span("the client left")
                entry.task.cancel()

    async def run(self) -> None:
        """Ends the requests of clients that do not read, until cancelled."""
        while True:
            await asyncio.sleep(self._max_unread_s / 4)
            self.end_unread()

    def end_unread(self) -> None:
        """Cancels requests none of whose clients has read anything for too long.

        Their outputs would pile up here, and the tokens to come are for nobody.
        """
        now = time.monotonic()
        for entry in list(self._running.values()):
            if entry.run.log.unread_s(now) > self._max_unread_s:
                event(logger, logging.WARNING, "client_does_not_read", request_id=entry.key[1])
                self._forget(entry)
                entry.run.log.fail(Cancelled("the client did not read its answer"))
                entry.task.cancel()

    async def wait_empty(self) -> None:
        """Returns when no request runs."""
        while self._running:
            await asyncio.wait({entry.task for entry in self._running.values()})

    async def close(self) -> None:
        """Cancels every request, waits until they have ended, and takes no new one."""
        self._is_closed = True
        tasks = [entry.task for entry in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _join(self, claim: _Claim) -> _Entry | None:
        self._forget_old()
        entry = self._running.get(claim.key) or self._finished.get(claim.key)
        if entry is None:
            return None
        if entry.digest != claim.digest:
            raise AlreadyExists(
                f"request_id {claim.key[1]!r} is in use for another request",
                field="request_id",
            )
        return entry

    def _start(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        tenant: str,
        claim: _Claim | None,
        trace: TraceContext,
    ) -> _Entry:
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        shared = self._shared
        worker_request_id = f"{shared.router_id}/{next(self._numbers)}/{request.request_id}"
        owner = shared.tenants.current.named(tenant)
        span = begin_request(shared.tracer, trace, request, owner, shared.limits.served_name)
        context = RequestContext(worker_request_id, deadline, owner, span)
        run = RequestRun(request, context, shared)
        task = asyncio.get_running_loop().create_task(run.run())
        is_named = claim is not None
        claim = claim or _Claim((tenant, request.request_id, 0), b"")
        entry = _Entry(claim.key, run, task, claim.digest, is_named)
        self._running[entry.key] = entry
        task.add_done_callback(lambda _: self._ended(entry))
        return entry

    def _forget(self, entry: _Entry) -> None:
        if self._running.get(entry.key) is entry:
            del self._running[entry.key]

    def _ended(self, entry: _Entry) -> None:
        self._forget(entry)
        entry.run.end_span()
        self._shared.metrics.request_ended(entry.run.log, entry.task.cancelled())
        # A failed request is run again when it is asked for again.
        if entry.is_named and entry.run.log.outcome is not None:
            entry.finished_at = asyncio.get_running_loop().time()
            self._finished[entry.key] = entry
            self._num_remembered_tokens += entry.run.log.num_tokens
            self._forget_old()

    def _forget_old(self) -> None:
        horizon = asyncio.get_running_loop().time() - REMEMBER_S
        while self._finished:
            key, entry = next(iter(self._finished.items()))
            is_small = len(self._finished) <= MAX_REMEMBERED
            is_small &= self._num_remembered_tokens <= MAX_REMEMBERED_TOKENS
            if entry.finished_at > horizon and is_small:
                return
            del self._finished[key]
            self._num_remembered_tokens -= entry.run.log.num_tokens


@contextmanager
def _ending_at(deadline: float, follower: Follower) -> Iterator[None]:
    """Whose own time is over hears it, whatever time the request has."""
    error = DeadlineExceeded("the request's time is over")
    timer = asyncio.get_running_loop().call_at(deadline, follower.fail, error)
    try:
        yield
    finally:
        timer.cancel()


def _claim(request: inference_pb2.GenerateRequest, tenant: str, part: Part | None) -> _Claim:
    digest = _digest(request)
    if part is None:
        return _Claim((tenant, request.request_id, 0), digest)
    # Another id than of one prompt alone, which a client may choose as well: "id/1".
    return _Claim((tenant, part.request_id, part.index), digest + part.content)


def _digest(request: inference_pb2.GenerateRequest) -> bytes:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
