"""One attempt at a request: a pair of workers is told, their outputs are taken in.

    Decode(request) to D, then Prefill(request) to P  ->  outputs on both Attach streams

D is told first, so that it knows the request when P asks it for room. Without a P, D computes
the prompt itself. Whatever ends the attempt early, all that were told are told to drop it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import worker_pb2
from core.errors import BatonError, Unreachable, from_detail, from_exception
from core.logs import event
from core.rpc import pod_errors
from core.tasks import TaskSet
from router.attach import WorkerLink
from router.choice import Choice
from router.routing import Work

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_PREFILL_REPORT_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Placement:
    """The workers of one attempt, and what it adds to the load of each."""

    prefill: WorkerLink | None
    """None: the request stays on decode."""
    decode: WorkerLink
    prefill_work: Work
    decode_work: Work

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class AttemptFailed(Exception):
    """An attempt ended without an outcome. `suspects`: workers to avoid in the next one."""

    def __init__(self, error: BatonError, suspects: frozenset[str]) -> None:
        super().__init__(error.message)
        self.error = error
        self.suspects = suspects


class Attempt:
    """An OutputSink for one (request, attempt). Use once: `await run()`.

    `choices` are those that the dispatch is about: all of a request's, or one.
    """

    def __init__(
        self,
        dispatch: worker_pb2.Dispatch,
        placement: Placement,
        choices: Sequence[Choice],
        tasks: TaskSet,
    ) -> None:
        self._message = dispatch
        self._placement = placement
        self._tasks = tasks
        self._key = (dispatch.request_id, dispatch.attempt)
        self._open = dict(enumerate(choices))
        """Choices that go on, by their number in the dispatch."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prefill_reported = asyncio.Event()
        self._held: list[worker_pb2.SequenceOutput] | None = (
            [] if dispatch.HasField("prompt_logprobs") else None
        )
        """What decode said before prefill has, which alone knows the prompt's."""
        self._must_abort = False
        self._is_handed_off = False
        self._first_token_at: float | None = None
        self.handoff_s: float | None = None
        """From prefill's first token until decode spoke; None without both."""
        self.cached_tokens = 0
        self.transferred_blocks = 0

    async def run(self) -> None:
        """Returns when every choice is finished, or was preempted by decode.

        A preempted one wants another attempt, which goes on from here; nothing has failed.
        Raises AttemptFailed.
        """
        placement = self._placement
        if placement.prefill is not None:
            placement.prefill.subscribe(self._key, self, placement.prefill_work)
        placement.decode.subscribe(self._key, self, placement.decode_work)
        telling = self._tasks.start(self._tell())
        try:
            await self._ended
            await self._wait_for_prefill_report()
        finally:
            self._ended.cancel()
            for link in placement.links:
                link.unsubscribe(self._key)
            if self._must_abort or self._open:
                self._tasks.start(self._abort(telling))

    def on_output(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        """Takes one worker's message; whatever is wrong with it fails the attempt."""
        try:
            self._take(link, output)
        except Exception as error:
            logger.exception("output of %s cannot be used", link.worker_id)
            self._fail(from_exception(error), *self._placement.links)

    def on_lost(self, link: WorkerLink, error: BatonError) -> None:
        """Fails the attempt, unless decode has all that is needed of prefill."""
        if link is self._placement.prefill and self._is_handed_off and self._held is None:
            self._prefill_reported.set()
        else:
            self._fail(error, link)

    def _take(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.token_ids:
            link.predicted.prefilled(self._key)
        if link is self._placement.prefill:
            self._prefill_reported.set()
            self._first_token_at = self._first_token_at or time.monotonic()
        else:
            if self.handoff_s is None and self._first_token_at is not None:
                self.handoff_s = time.monotonic() - self._first_token_at
            self.transferred_blocks = max(self.transferred_blocks, output.transferred_blocks)
            # Decode speaks, but to fail, when it has prefill's KV.
            self._is_handed_off = True
        if self._ended.done():
            return
        if output.HasField("error"):
            # A worker reports its partner's faults too, so both are suspects.
            self._fail(from_detail(output.error), *self._placement.links)
        elif self._held is not None and link is self._placement.decode:
            self._held.append(output)
        else:
            self._receive(link, output)
            if output.prompt_logprobs and self._held is not None:
                held, self._held = self._held, None
                for waiting in held:
                    self._receive(self._placement.decode, waiting)

    def _receive(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        choice = self._open.get(output.choice)
        if choice is None:
            return
        if not output.preempted:
            choice.receive(output)
            if not choice.is_finished:
                return
            if not output.finish_reason:
                self._stop_choice(output.choice)
            # Decode learns from prefill that the first token was the last, if nothing is lost.
            self._must_abort |= link is self._placement.prefill
        del self._open[output.choice]
        if not self._open:
            self._ended.set_result(None)

    def _stop_choice(self, number: int) -> None:
        """A stop string ended a choice, of which decode knows nothing."""
        if len(self._open) == 1:
            self._must_abort = True
            return
        request = worker_pb2.AbortRequest(
            request_id=self._key[0], attempt=self._key[1], choice=number
        )
        self._tasks.start(self._abort_at(self._placement.decode, request))

    def _fail(self, error: BatonError, *suspects: WorkerLink) -> None:
        if not self._ended.done():
            names = frozenset(link.worker_id for link in suspects)
            self._ended.set_exception(AttemptFailed(error, names))

    async def _wait_for_prefill_report(self) -> None:
        """Decode's stream may overtake prefill's, which alone says how much was cached there."""
        if self._placement.prefill is None:
            return
        try:
            async with asyncio.timeout(_PREFILL_REPORT_TIMEOUT_S):
                await self._prefill_reported.wait()
        except TimeoutError:
            event(logger, logging.WARNING, "prefill_report_missing", request_id=self._key[0])

    async def _tell(self) -> None:
        prefill, decode = self._placement.prefill, self._placement.decode
        partner = None if prefill is None else prefill.address
        await self._call(
            decode,
            decode.decode.Decode,
            worker_pb2.DecodeRequest(dispatch=self._message, prefill=partner),
        )
        if prefill is not None and not self._ended.done():
            await self._call(
                prefill,
                prefill.prefill.Prefill,
                worker_pb2.PrefillRequest(dispatch=self._message, decode=decode.address),
            )

    async def _call(self, link: WorkerLink, method: Any, request: Any) -> None:
        try:
            with pod_errors(f"worker {link.worker_id}"):
                await method(request, timeout=_CALL_TIMEOUT_S)
            link.predicted.acknowledge(self._key)
        except Unreachable as error:
            self._fail(error, link)
        except BatonError as error:
            # Decode refuses also when it cannot reach prefill.
            self._fail(error, *self._placement.links)

    async def _abort(self, telling: asyncio.Task[Any]) -> None:
        """Tells the workers to drop the attempt, after they have heard of it."""
        await asyncio.wait({telling})
        request = worker_pb2.AbortRequest(request_id=self._key[0], attempt=self._key[1])
        await asyncio.gather(*(self._abort_at(link, request) for link in self._placement.links))

    async def _abort_at(self, link: WorkerLink, request: worker_pb2.AbortRequest) -> None:
        try:
            with pod_errors(f"worker {link.worker_id}"):
                await link.worker.Abort(request, timeout=_CALL_TIMEOUT_S)
        except BatonError as error:
            # The stream to it is broken too then, at which the worker aborts by itself.
            event(
                logger,
                logging.DEBUG,
                "abort_not_delivered",
                worker_id=link.worker_id,
                request_id=request.request_id,
                error=error.message,
            )
