"""One attempt at a request: a pair of workers is told, their outputs are taken in.

    assignments to D and P  ->  outputs of both

P may be the first to hear; D then has P's question for room wait. Without a P, D computes the
prompt itself. Whatever ends the attempt early, all that were told are told to drop it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.v1 import types_pb2, worker_pb2
from core.errors import BatonError, HandOffGivenUp, Unavailable, from_detail, from_exception
from core.logs import event
from router.attach import TakeToken, WorkerLink
from router.choice import Choice
from router.routing import Work

logger = logging.getLogger(__name__)

_PREFILL_REPORT_TIMEOUT_S = 0.5
_REASON_TIMEOUT_S = 0.5
"""For the word of the worker that gave a hand-off up, when its partner's comes first."""


@dataclass(frozen=True)
class Placement:
    """The workers of one attempt, and what it adds to the load of each."""

    prefill: WorkerLink | None
    """None: the request stays on decode."""
    decode: WorkerLink
    prefill_work: Work
    decode_work: Work
    num_uncached: int = 0
    """Tokens of the prompt that are to be computed, as far as is known."""
    source: worker_pb2.PrefixSource | None = None
    """Whose prefix prefill may take over."""

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
    `on_first_output` is called with each worker whose first tokens have come.
    """

    def __init__(
        self,
        dispatch: worker_pb2.Dispatch,
        placement: Placement,
        choices: Sequence[Choice],
        on_first_output: Callable[[WorkerLink], None],
    ) -> None:
        self._message = dispatch
        self._placement = placement
        self._on_first_output = on_first_output
        self._heard: set[WorkerLink] = set()
        self._key = (dispatch.request_id, dispatch.attempt)
        self._stream_id = dispatch.stream_id
        self._choices = choices
        self._open = dict(enumerate(choices))
        """Choices that go on, by their number in the dispatch."""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: tuple[BatonError, frozenset[str]] | None = None
        self._prefill_reported = asyncio.Event()
        self._held: list[worker_pb2.SequenceOutput] | None = (
            [] if dispatch.HasField("prompt_logprobs") else None
        )
        """What decode said before prefill has told the prompt's log-probabilities."""
        self._prompt_logprobs: list[types_pb2.TokenLogprobs] = []
        self._must_abort = False
        self._is_handed_off = False
        self._given_up: asyncio.TimerHandle | None = None
        self._first_token_at: float | None = None
        self.handoff_s: float | None = None
        """From prefill's first token until decode spoke; None without both."""
        self.cached_tokens = 0
        self.transferred_blocks = 0

    @property
    def has_begun(self) -> bool:
        """Whether a worker has told a token."""
        return bool(self._heard)

    async def run(self) -> None:
        """Returns when every choice is finished, or was preempted by decode.

        A preempted one wants another attempt, which goes on from here; nothing has failed.
        Raises AttemptFailed.
        """
        placement = self._placement
        if placement.prefill is not None:
            placement.prefill.subscribe(self._message, self, placement.prefill_work)
        placement.decode.subscribe(self._message, self, placement.decode_work)
        for number, choice in self._open.items():
            placement.decode.take_tokens(self._stream_id + number, self._taker(number, choice))
        try:
            self._assign(placement.decode, placement.prefill)
            if placement.prefill is not None:
                self._assign(placement.prefill, placement.decode, placement.source)
            await self._ended
            if self._failure is not None:
                raise AttemptFailed(*self._failure)
            await self._wait_for_prefill_report()
        finally:
            self._ended.cancel()
            if self._given_up is not None:
                self._given_up.cancel()
            for number, choice in enumerate(self._choices):
                placement.decode.leave_tokens(self._stream_id + number)
                # Or the two would hold each other, and the prompt, until garbage is looked for.
                choice.leave_tokens()
            for link in placement.links:
                link.unsubscribe(self._message)
            if self._must_abort or self._open:
                for link in placement.links:
                    link.abort(self._key)

    def on_output(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        """Takes one worker's message; whatever is wrong with it fails the attempt."""
        try:
            if link not in self._heard and output.token_ids:
                self._hear(link, output)
            self._take(link, output)
        except Exception as error:
            self._fail_at(link, error)

    def _taker(self, number: int, choice: Choice) -> TakeToken:
        """Takes single tokens of one choice, which decode has spoken of before."""
        take = choice.token_taker(partial(self._stopped, number), self._fail_at_decode)
        if self._held is None:
            return take

        def hold(output_index: int, token_id: int, now: float) -> None:
            if self._held is None:
                take(output_index, token_id, now)
                return
            output = worker_pb2.SequenceOutput(
                output_index=output_index, token_ids=[token_id], choice=number
            )
            self._held.append(output)

        return hold

    def _stopped(self, number: int) -> None:
        """A stop string ended a choice at a token that says nothing of an end."""
        self._stop_choice(number)
        self._close(number)

    def _fail_at_decode(self, error: Exception) -> None:
        self._fail_at(self._placement.decode, error)

    def _fail_at(self, link: WorkerLink, error: Exception) -> None:
        """What a worker said cannot be used."""
        logger.error("output of %s cannot be used", link.worker_id, exc_info=error)
        self._fail(from_exception(error), *self._placement.links)

    def on_lost(self, link: WorkerLink, error: BatonError) -> None:
        """Fails the attempt, unless decode has all that is needed of prefill."""
        if link is self._placement.prefill and self._is_handed_off and self._held is None:
            self._prefill_reported.set()
        else:
            self._fail(error, link)

    def _hear(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        """A worker's first token, with what it has to say about the prompt."""
        self._heard.add(link)
        link.predicted.prefilled(self._stream_id)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if link is self._placement.prefill:
            self._prefill_reported.set()
            self._first_token_at = time.monotonic()
        else:
            self.transferred_blocks = output.transferred_blocks
            # Decode speaks, but to fail, when it has prefill's KV.
            self._is_handed_off = True
            if self._first_token_at is not None:
                self.handoff_s = time.monotonic() - self._first_token_at
        self._on_first_output(link)

    def _take(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        if self._ended.done():
            return
        if output.HasField("error"):
            self._take_error(from_detail(output.error))
        elif self._held is not None:
            self._hold(self._held, link, output)
        else:
            self._receive(link, output)

    def _take_error(self, error: BatonError) -> None:
        """Fails the attempt, in a while if the other worker has yet to say why it gave up."""
        # A worker reports its partner's faults too, so both are suspects.
        suspects = self._placement.links
        if not isinstance(error, HandOffGivenUp):
            self._fail(error, *suspects)
        elif self._given_up is None:
            self._given_up = asyncio.get_running_loop().call_later(
                _REASON_TIMEOUT_S, self._fail, Unavailable(error.message), *suspects
            )

    def _hold(
        self,
        held: list[worker_pb2.SequenceOutput],
        link: WorkerLink,
        output: worker_pb2.SequenceOutput,
    ) -> None:
        """Until prefill's first token, which follows all of the prompt's log-probabilities."""
        if link is self._placement.decode:
            held.append(output)
            return
        self._prompt_logprobs += output.prompt_logprobs
        if not output.token_ids:
            return
        self._held = None
        self._choices[0].receive_prompt(self._prompt_logprobs)
        self._receive(link, output)
        for waiting in held:
            self._receive(self._placement.decode, waiting)

    def _receive(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        choice = self._open.get(output.choice)
        if choice is None:
            return
        if output.preempted:
            if not self._is_handed_off:
                # Prefill has not finished, may wait yet, and nobody wants its part any more.
                self._must_abort = True
                self._prefill_reported.set()
        else:
            choice.receive(output)
            if not choice.is_finished:
                return
            if not output.finish_reason:
                self._stop_choice(output.choice)
            # Decode learns from prefill that the first token was the last, if nothing is lost.
            self._must_abort |= link is self._placement.prefill
        self._close(output.choice)

    def _close(self, number: int) -> None:
        """A choice takes nothing more from this attempt."""
        del self._open[number]
        self._placement.decode.leave_tokens(self._stream_id + number)
        if not self._open and not self._ended.done():
            self._ended.set_result(None)

    def _stop_choice(self, number: int) -> None:
        """A stop string ended a choice, of which decode knows nothing."""
        if len(self._open) == 1:
            self._must_abort = True
            return
        self._placement.decode.abort(self._key, number)

    def _assign(
        self,
        link: WorkerLink,
        partner: WorkerLink | None,
        source: worker_pb2.PrefixSource | None = None,
    ) -> None:
        if self._ended.done():
            return
        try:
            link.assign(self._message, partner, source)
        except BatonError as error:
            self._fail(error, link)

    def _fail(self, error: BatonError, *suspects: WorkerLink) -> None:
        if not self._ended.done():
            # Not as the future's exception: that would hold this, and be held by it.
            self._failure = error.bare(), frozenset(link.worker_id for link in suspects)
            self._ended.set_result(None)

    async def _wait_for_prefill_report(self) -> None:
        """Decode's stream may overtake prefill's, which alone says how much was cached there."""
        if self._placement.prefill is None or self._prefill_reported.is_set():
            return
        try:
            async with asyncio.timeout(_PREFILL_REPORT_TIMEOUT_S):
                await self._prefill_reported.wait()
        except TimeoutError:
            event(logger, logging.WARNING, "prefill_report_missing", request_id=self._key[0])
