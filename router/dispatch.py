"""One attempt at a request: a pair of workers is told, their outputs are taken in.

    Decode(request) to D, then Prefill(request) to P  ->  outputs on both Attach streams

D is told first, so that it knows the request when P asks it for room. Whatever ends the
attempt early, both workers are told to drop it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import worker_pb2
from core.errors import BatonError, Unreachable, from_detail, from_exception
from core.logs import event
from core.rpc import pod_errors
from core.tasks import TaskSet
from router.attach import WorkerLink
from router.choice import Choice

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 10.0
_PREFILL_REPORT_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Placement:
    """The pair of workers of one attempt."""

    prefill: WorkerLink
    decode: WorkerLink
    num_missing_tokens: int
    """What prefill must compute, as far as the index knows."""

    @property
    def links(self) -> tuple[WorkerLink, WorkerLink]:
        return (self.prefill, self.decode)


class AttemptFailed(Exception):
    """An attempt ended without an outcome. `suspects`: workers to avoid in the next one."""

    def __init__(self, error: BatonError, suspects: frozenset[str]) -> None:
        super().__init__(error.message)
        self.error = error
        self.suspects = suspects


class Attempt:
    """An OutputSink for one (request, attempt). Use once: `await run()`.

    `choices` are those that the dispatch is about: all of a request's, or one.
    `on_first_output` is called with each worker whose first tokens have come.
    """

    def __init__(
        self,
        dispatch: worker_pb2.Dispatch,
        placement: Placement,
        choices: Sequence[Choice],
        tasks: TaskSet,
        on_first_output: Callable[[WorkerLink], None],
    ) -> None:
        self._message = dispatch
        self._placement = placement
        self._tasks = tasks
        self._on_first_output = on_first_output
        self._heard: set[str] = set()
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
        self.cached_tokens = 0
        self.transferred_blocks = 0

    async def run(self) -> None:
        """Returns when every choice is finished, or was preempted by decode.

        A preempted one wants another attempt, which goes on from here; nothing has failed.
        Raises AttemptFailed.
        """
        placement = self._placement
        placement.prefill.subscribe(self._key, self, placement.num_missing_tokens)
        placement.decode.subscribe(self._key, self, 0)
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
        if output.token_ids and link.worker_id not in self._heard:
            self._heard.add(link.worker_id)
            self._on_first_output(link)
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
        if link is self._placement.prefill:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            self._prefill_reported.set()
        else:
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
            # Of a prompt of one token there are none, so that they cannot be the sign.
            if self._held is not None and output.choice == 0:
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
        """Decode's stream may overtake prefill's, which alone says how much was cached."""
        try:
            async with asyncio.timeout(_PREFILL_REPORT_TIMEOUT_S):
                await self._prefill_reported.wait()
        except TimeoutError:
            event(logger, logging.WARNING, "prefill_report_missing", request_id=self._key[0])

    async def _tell(self) -> None:
        prefill, decode = self._placement.links
        await self._call(
            decode,
            decode.decode.Decode,
            worker_pb2.DecodeRequest(dispatch=self._message, prefill=prefill.address),
        )
        if not self._ended.done():
            await self._call(
                prefill,
                prefill.prefill.Prefill,
                worker_pb2.PrefillRequest(dispatch=self._message, decode=decode.address),
            )

    async def _call(self, link: WorkerLink, method: Any, request: Any) -> None:
        try:
            with pod_errors(f"worker {link.worker_id}"):
                await method(request, timeout=_CALL_TIMEOUT_S)
        except Unreachable as error:
            self._fail(error, link)
        except BatonError as error:
            # Decode refuses also when it cannot reach prefill.
            self._fail(error, *self._placement.links)

    async def _abort(self, telling: asyncio.Task[Any]) -> None:
        """Tells both workers to drop the attempt, after they have heard of it."""
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
