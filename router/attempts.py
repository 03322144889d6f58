"""Attempts at one request, until all its choices are finished or it has failed too often.

    place → dispatch → outputs; after a failure: back off, and again on other workers

Each attempt goes on from the outputs that there are. Choices that have different ones by then
each have a branch of attempts of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from baton.v1 import inference_pb2, worker_pb2
from core.errors import BatonError, Unavailable
from core.logs import event
from core.sampling import choice_seed
from core.tasks import together
from core.tracing import Span
from router.admission import Ticket
from router.attach import WorkerLink
from router.choice import Choice
from router.dispatch import Attempt, AttemptFailed, Placement
from router.generation import Generation
from router.outputs import OutputLog
from router.placement import Sought
from router.request_context import RequestContext
from router.request_spans import attempt_span
from router.retries import backoff_s, is_final, without_addresses
from router.validate import ResolvedRequest

logger = logging.getLogger(__name__)


@dataclass
class _Branch:
    """Choices that one series of attempts is about: all of a request's, or one of them."""

    worker_request_id: str
    choices: Sequence[Choice]
    seed: int
    ticket: Ticket
    num_attempts: int = 0
    num_failures: int = 0
    avoid: frozenset[str] = frozenset()
    """Workers that attempts have failed on."""


class Attempts:
    """All those at `resolved`. Use once: `await run(…)`.

    `prompt` is what every dispatch says of the prompt's tokens: to list them takes long, to
    copy not.
    """

    def __init__(
        self,
        resolved: ResolvedRequest,
        prompt: worker_pb2.Dispatch,
        context: RequestContext,
        shared: Generation,
        log: OutputLog,
    ) -> None:
        self.route = inference_pb2.Route()
        """Where the last attempt went and what it found there; kept up to date."""
        self._resolved = resolved
        self._prompt = prompt
        self._context = context
        self._shared = shared
        self._log = log
        self._worker_wait_s = shared.worker_wait_s
        self._is_prompt_counted = False

    async def run(self, choices: Sequence[Choice], ticket: Ticket) -> None:
        """Returns when all `choices` are finished. Raises BatonError."""
        seed = self._resolved.sampling.seed
        await self._finish(_Branch(self._context.worker_request_id, choices, seed, ticket))

    async def _finish(self, branch: _Branch) -> None:
        """Attempts until all choices of `branch` are finished.

        Choices that have different outputs by then each go on by themselves.
        """
        while True:
            branch.num_attempts += 1
            try:
                await self._attempt(branch)
            except AttemptFailed as failure:
                branch.num_failures += 1
                branch.avoid |= failure.suspects
                _log_failure(branch, failure.error)
                if is_final(failure.error, branch.num_failures):
                    raise without_addresses(failure.error).bare() from None
                rng = self._shared.rng
                await asyncio.sleep(backoff_s(failure.error, branch.num_failures, rng))
            left = [choice for choice in branch.choices if not choice.is_finished]
            if not left:
                return
            if len(branch.choices) > 1 and any(choice.token_ids for choice in branch.choices):
                await self._finish_apart(branch, left)
                return

    async def _finish_apart(self, branch: _Branch, choices: Iterable[Choice]) -> None:
        branches = [
            replace(
                branch,
                worker_request_id=f"{branch.worker_request_id}/{choice.index}",
                choices=[choice],
                seed=choice_seed(branch.seed, choice.index),
            )
            for choice in choices
        ]
        await together([self._finish(single) for single in branches])

    async def _attempt(self, branch: _Branch) -> None:
        """One attempt. Raises AttemptFailed."""
        sought = self._sought(branch)
        with self._context.span.child("router.placement"):
            placement = await self._place(sought)
        prefill = placement.prefill
        self.route.prefill_worker = "" if prefill is None else prefill.worker_id
        self.route.decode_worker = placement.decode.worker_id
        self.route.attempts += 1
        if self.route.attempts > 1:
            self._shared.metrics.attempt_repeated()
        branch.ticket.placed(
            None if prefill is None else prefill.worker_id,
            placement.decode.worker_id,
            placement.num_uncached,
        )
        dispatch = self._dispatch(branch)
        with attempt_span(self._context.span, dispatch, placement, branch.choices) as span:
            await self._run_attempt(dispatch, placement, branch, span)

    def _sought(self, branch: _Branch) -> Sought:
        """With several choices there are no outputs yet."""
        resolved = self._resolved
        token_ids = [*resolved.prompt_token_ids, *branch.choices[0].token_ids]
        # What is handed off is the prompt of several choices, or one that is computed whole.
        may_stay = len(branch.choices) == 1 and resolved.prompt_logprobs is None
        return Sought(token_ids, self._context.tenant.salt, branch.avoid, may_stay)

    async def _place(self, sought: Sought) -> Placement:
        """Waits for a worker of each role, since one that has died may soon be replaced.

        Raises Unavailable when the request has waited for as long as it may.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._shared.placer.place(sought)
            except Unavailable:
                if self._worker_wait_s <= 0:
                    raise
            began_at = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._worker_wait_s):
                    await self._shared.placer.pool.wait_changed()
            self._worker_wait_s -= loop.time() - began_at

    def _dispatch(self, branch: _Branch) -> worker_pb2.Dispatch:
        resolved, sampling = self._resolved, self._resolved.sampling
        if sampling.seed != branch.seed:
            sampling = replace(sampling, seed=branch.seed)
        wants_prompt = resolved.prompt_logprobs is not None and not self._log.prompt_logprobs
        dispatch = worker_pb2.Dispatch(
            request_id=branch.worker_request_id,
            attempt=branch.num_attempts,
            router_id=self._shared.router_id,
            output_token_ids=branch.choices[0].token_ids,
            sampling=sampling.to_proto(),
            eos_token_ids=sampling.eos_token_ids,
            timeout_s=max(0.001, self._context.time_left_s()),
            hash_salt=self._context.tenant.salt,
            n=len(branch.choices),
            prompt_logprobs=resolved.prompt_logprobs if wants_prompt else None,
            stream_id=self._shared.stream_ids.take(len(branch.choices)),
        )
        dispatch.MergeFrom(self._prompt)
        return dispatch

    async def _run_attempt(
        self, dispatch: worker_pb2.Dispatch, placement: Placement, branch: _Branch, span: Span
    ) -> None:
        with self._shared.breaker.attempt(placement.links) as trial:

            def on_first_output(link: WorkerLink) -> None:
                branch.ticket.prefilled()
                trial.works(link)
                span.event("first_output", {"baton.worker": link.worker_id})

            attempt = Attempt(dispatch, placement, branch.choices, on_first_output)
            try:
                await attempt.run()
            finally:
                self._note(attempt, len(dispatch.prompt_token_ids), span)

    def _note(self, attempt: Attempt, num_prompt: int, span: Span) -> None:
        """What an attempt that is over has shown, whatever came of it."""
        if attempt.handoff_s is not None:
            self._shared.placer.local_limit.observe_handoff(attempt.handoff_s)
        # A later attempt may find outputs in the cache, too.
        self.route.cached_tokens = min(attempt.cached_tokens, num_prompt)
        if attempt.has_begun and not self._is_prompt_counted:
            self._is_prompt_counted = True
            self._shared.metrics.prompt_computed(num_prompt, self.route.cached_tokens)
        self.route.transferred_blocks = attempt.transferred_blocks
        span.set(
            {
                "baton.cached_tokens": attempt.cached_tokens,
                "baton.transferred_blocks": attempt.transferred_blocks,
            }
        )


def _log_failure(branch: _Branch, error: BatonError) -> None:
    event(
        logger,
        logging.WARNING,
        "attempt_failed",
        request_id=branch.worker_request_id,
        attempt=branch.num_attempts,
        error=f"{type(error).__name__}: {error.message}",
    )
