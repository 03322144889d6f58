"""Requests in flight and lately finished, by the id that the client chose.

A second call with the same id and content joins the first: it gets everything from the
first token on. When the last of its callers leaves, a request is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.v1 import inference_pb2
from core.errors import AlreadyExists
from core.logs import event
from router.outputs import Follower
from router.request import Generation, RequestRun

logger = logging.getLogger(__name__)

REMEMBER_S = 60.0
MAX_REMEMBERED = 1024
MAX_REMEMBERED_TOKENS = 200_000


@dataclass(eq=False)
class _Entry:
    request_id: str
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
        self._running: dict[str, _Entry] = {}
        self._finished: OrderedDict[str, _Entry] = OrderedDict()
        self._num_remembered_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextmanager
    def follow(self, request: inference_pb2.GenerateRequest, deadline: float) -> Iterator[Follower]:
        """Follows the outputs of `request`, started now or joined. Raises AlreadyExists.

        `deadline` (event loop time) counts for a request that this call starts. Leaving the
        context gives the caller's interest up.
        """
        entry = self._join(request) or self._start(request, deadline)
        try:
            with entry.run.log.follow() as follower:
                yield follower
        finally:
            if entry.run.log.num_followers == 0 and not entry.task.done():
                self._forget(entry)
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
                event(logger, logging.WARNING, "client_does_not_read", request_id=entry.request_id)
                self._forget(entry)
                entry.task.cancel()

    async def close(self) -> None:
        """Cancels every request and waits until they have ended."""
        tasks = [entry.task for entry in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _join(self, request: inference_pb2.GenerateRequest) -> _Entry | None:
        self._forget_old()
        request_id = request.request_id
        entry = self._running.get(request_id) or self._finished.get(request_id)
        if entry is None:
            return None
        if entry.digest != _digest(request):
            raise AlreadyExists(
                f"request_id {request_id!r} is in use for another request", field="request_id"
            )
        return entry

    def _start(self, request: inference_pb2.GenerateRequest, deadline: float) -> _Entry:
        is_named = bool(request.request_id)
        digest = _digest(request) if is_named else b""
        if not is_named:
            request.request_id = uuid.uuid4().hex
        worker_request_id = f"{self._shared.router_id}/{next(self._numbers)}/{request.request_id}"
        run = RequestRun(request, worker_request_id, deadline, self._shared)
        task = asyncio.get_running_loop().create_task(run.run())
        entry = _Entry(request.request_id, run, task, digest, is_named)
        self._running[request.request_id] = entry
        task.add_done_callback(lambda _: self._ended(entry))
        return entry

    def _forget(self, entry: _Entry) -> None:
        if self._running.get(entry.request_id) is entry:
            del self._running[entry.request_id]

    def _ended(self, entry: _Entry) -> None:
        self._forget(entry)
        # A failed request is run again when it is asked for again.
        if entry.is_named and entry.run.log.outcome is not None:
            entry.finished_at = asyncio.get_running_loop().time()
            self._finished[entry.request_id] = entry
            self._num_remembered_tokens += entry.run.log.num_tokens
            self._forget_old()

    def _forget_old(self) -> None:
        horizon = asyncio.get_running_loop().time() - REMEMBER_S
        while self._finished:
            request_id, entry = next(iter(self._finished.items()))
            is_small = len(self._finished) <= MAX_REMEMBERED
            is_small &= self._num_remembered_tokens <= MAX_REMEMBERED_TOKENS
            if entry.finished_at > horizon and is_small:
                return
            del self._finished[request_id]
            self._num_remembered_tokens -= entry.run.log.num_tokens


def _digest(request: inference_pb2.GenerateRequest) -> bytes:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
