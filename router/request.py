"""One request's life in the router: resolve, then attempts until it has an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.v1 import inference_pb2, worker_pb2
from core.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
    status_of,
)
from core.logs import event
from core.sampling import choice_seed
from core.tracing import Span
from router.admission import Ticket
from router.admission_refusals import Demand
from router.attach import WorkerLink
from router.choice import Choice, Pace
from router.dispatch import Attempt, AttemptFailed, Placement
from router.fallback import FALLBACK_NAME
from router.generation import Generation
from router.outputs import Outcome, OutputLog
from router.placement import Sought
from router.quotas import Charge
from router.request_spans import attempt_span, end_request
from router.tenants import Tenant
from router.validate import (
    ModelLimits,
    ResolvedRequest,
    check_request,
    complete_request,
    input_field,
    num_choices,
)

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Attempts that may fail; those that decode preempts do not count."""
_IDS_AT_ONCE = 1 << 14
"""Token ids that are read or checked in less than a millisecond."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_FAILED_RETRY_S = 1.0
"""For clients whose request has failed so often: workers that have died are ejected by then."""


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


class RequestRun:
    """Produces the outputs of one request of `tenant` into `log`.

    `worker_request_id` is unique in the life of the whole deployment, unlike the client's
    id: workers must not confuse two requests. `deadline` is in the event loop's time.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        worker_request_id: str,
        deadline: float,
        tenant: Tenant,
        shared: Generation,
        span: Span,
    ) -> None:
        self.log = OutputLog(num_choices(request))
        self._request = request
        self._worker_request_id = worker_request_id
        self._deadline = deadline
        self._tenant = tenant
        self._shared = shared
        self._span = span
        self._received_at = time.monotonic()
        self._worker_wait_s = shared.worker_wait_s
        self._route = inference_pb2.Route()
        self._prompt = worker_pb2.Dispatch()
        """What every dispatch says of the prompt's tokens: to list them takes long, to copy not."""
        self._is_prompt_counted = False

    async def run(self) -> None:
        """Ends with the log finished or failed; raises only CancelledError."""
        try:
            async with asyncio.timeout_at(self._deadline):
                resolved = await self._resolve()
                usage = await self._serve(resolved)
                self.log.finish(self._outcome(usage))
        except asyncio.CancelledError:
            # Who still listens now hears it because the router stops.
            self.log.fail(Unavailable("the router is shutting down"))
            raise
        except TimeoutError:
            self.log.fail(DeadlineExceeded("the request's time is over"))
        except Exception as error:
            self.log.fail(error)
        finally:
            # What is remembered of a request is its answer.
            self._prompt.Clear()

    def end_span(self, cancelled: str | None = None) -> None:
        """Ends the request's span; `cancelled`: why nobody wants the request any more."""
        end_request(self._span, self.log, self._route, self._ttft_s, cancelled)

    async def _resolve(self) -> ResolvedRequest:
        limits = self._shared.current_limits()
        check_request(self._request, limits)
        token_ids = await self._tokenize(limits.max_model_len)
        complete = partial(self._complete, token_ids, limits, self._shared.rng.getrandbits(63))
        if len(token_ids) <= _IDS_AT_ONCE:
            return complete()
        return await asyncio.to_thread(complete)

    def _complete(
        self, token_ids: Sequence[int], limits: ModelLimits, drawn_seed: int
    ) -> ResolvedRequest:
        resolved = complete_request(self._request, token_ids, limits, drawn_seed)
        self._prompt.prompt_token_ids.extend(token_ids)
        return resolved

    async def _tokenize(self, max_tokens: int) -> list[int]:
        request, tokenizer = self._request, self._shared.tokenizer
        field = input_field(request)
        if field == "prompt":
            return await tokenizer.encode_prompt(request.prompt, max_tokens)
        if field == "messages":
            return await tokenizer.encode_chat(request.messages, max_tokens)
        return await _listed(request.token_ids.ids)

    async def _serve(self, resolved: ResolvedRequest) -> inference_pb2.Usage:
        """By this deployment's workers or, where they cannot, by the fallback."""
        admission, demand = self._shared.admission, self._demand(resolved)
        num_tokens = demand.num_prompt_tokens + admission.expected_outputs(demand)
        self._span.set({"gen_ai.usage.input_tokens": demand.num_prompt_tokens})
        async with admission.quota(self._tenant, demand.request_id, num_tokens) as charge:
            try:
                with self._span.child("router.admission"):
                    ticket = await admission.admit(demand)
                try:
                    await self._generate(resolved, ticket)
                finally:
                    ticket.close(self.log.num_tokens)
                    charge.num_used = demand.num_prompt_tokens + self.log.num_tokens
            except (ResourceExhausted, Unavailable) as refusal:
                return await self._serve_elsewhere(resolved, refusal, charge)
        return inference_pb2.Usage(
            prompt_tokens=demand.num_prompt_tokens, completion_tokens=self.log.num_tokens
        )

    async def _serve_elsewhere(
        self, resolved: ResolvedRequest, refusal: BatonError, charge: Charge
    ) -> inference_pb2.Usage:
        """By the fallback, whose tokens count like others. Raises `refusal` if not."""
        fallback, log = self._shared.fallback, self.log
        try:
            usage = await fallback.instead(refusal, self._tenant, self._request, resolved, log)
        finally:
            if log.first_token_at is not None and not log.num_tokens:
                # There is text of the endpoint, which has not told its usage yet.
                charge.num_used = charge.num_tokens
        charge.num_used = usage.prompt_tokens + usage.completion_tokens or charge.num_tokens
        self._route = inference_pb2.Route(decode_worker=FALLBACK_NAME, attempts=1)
        return usage

    def _demand(self, resolved: ResolvedRequest) -> Demand:
        return Demand(
            request_id=self._worker_request_id,
            tenant=self._tenant,
            num_prompt_tokens=len(resolved.prompt_token_ids),
            max_tokens=resolved.sampling.max_tokens,
            num_choices=resolved.n,
            priority=self._request.priority,
            time_left_s=self._deadline - asyncio.get_running_loop().time(),
        )

    async def _generate(self, resolved: ResolvedRequest, ticket: Ticket) -> None:
        tokenizer = self._shared.tokenizer
        pace = Pace(self._received_at, self._shared.metrics)
        choices = [
            Choice(index, self.log, tokenizer.detokenizer(), resolved, pace)
            for index in range(resolved.n)
        ]
        seed = resolved.sampling.seed
        await self._finish(resolved, _Branch(self._worker_request_id, choices, seed, ticket))

    async def _finish(self, resolved: ResolvedRequest, branch: _Branch) -> None:
        """Attempts until all choices of `branch` are finished.

        Choices that have different outputs by then each go on by themselves.
        """
        while True:
            branch.num_attempts += 1
            try:
                await self._attempt(resolved, branch)
            except AttemptFailed as failure:
                branch.num_failures += 1
                branch.avoid |= failure.suspects
                self._log_failure(branch, failure.error)
                is_final = branch.num_failures == MAX_FAILURES
                if is_final or not status_of(failure.error).retryable:
                    raise _without_addresses(failure.error) from None
                await asyncio.sleep(self._backoff_s(branch.num_failures, failure.error))
            left = [choice for choice in branch.choices if not choice.is_finished]
            if not left:
                return
            if len(branch.choices) > 1 and any(choice.token_ids for choice in branch.choices):
                await self._finish_apart(resolved, branch, left)
                return

    async def _finish_apart(
        self, resolved: ResolvedRequest, branch: _Branch, choices: Iterable[Choice]
    ) -> None:
        branches = [
            replace(
                branch,
                worker_request_id=f"{branch.worker_request_id}/{choice.index}",
                choices=[choice],
                seed=choice_seed(branch.seed, choice.index),
            )
            for choice in choices
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for single in branches:
                    group.create_task(self._finish(resolved, single))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _attempt(self, resolved: ResolvedRequest, branch: _Branch) -> None:
        """One attempt. Raises AttemptFailed."""
        # With several choices there are no outputs yet.
        outputs = branch.choices[0].token_ids
        # What is handed off is the prompt of several choices, or one that is computed whole.
        may_stay = len(branch.choices) == 1 and resolved.prompt_logprobs is None
        token_ids = [*resolved.prompt_token_ids, *outputs]
        sought = Sought(token_ids, self._tenant.salt, branch.avoid, may_stay)
        with self._span.child("router.placement"):
            placement = await self._place(sought)
        prefill = placement.prefill
        self._route.prefill_worker = "" if prefill is None else prefill.worker_id
        self._route.decode_worker = placement.decode.worker_id
        self._route.attempts += 1
        if self._route.attempts > 1:
            self._shared.metrics.attempt_repeated()
        branch.ticket.placed(
            None if prefill is None else prefill.worker_id,
            placement.decode.worker_id,
            placement.num_uncached,
        )
        dispatch = self._dispatch(resolved, branch)
        with attempt_span(self._span, dispatch, placement, branch.choices) as span:
            await self._run_attempt(dispatch, placement, branch, span)

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
                if attempt.handoff_s is not None:
                    self._shared.placer.local_limit.observe_handoff(attempt.handoff_s)
                # A later attempt may find outputs in the cache, too.
                num_prompt = len(dispatch.prompt_token_ids)
                self._route.cached_tokens = min(attempt.cached_tokens, num_prompt)
                if attempt.has_begun and not self._is_prompt_counted:
                    self._is_prompt_counted = True
                    self._shared.metrics.prompt_computed(num_prompt, self._route.cached_tokens)
                self._route.transferred_blocks = attempt.transferred_blocks
                span.set(
                    {
                        "baton.cached_tokens": attempt.cached_tokens,
                        "baton.transferred_blocks": attempt.transferred_blocks,
                    }
                )

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

    def _dispatch(self, resolved: ResolvedRequest, branch: _Branch) -> worker_pb2.Dispatch:
        sampling = resolved.sampling
        if sampling.seed != branch.seed:
            sampling = replace(sampling, seed=branch.seed)
        wants_prompt = resolved.prompt_logprobs is not None and not self.log.prompt_logprobs
        dispatch = worker_pb2.Dispatch(
            request_id=branch.worker_request_id,
            attempt=branch.num_attempts,
            router_id=self._shared.router_id,
            output_token_ids=branch.choices[0].token_ids,
            sampling=sampling.to_proto(),
            eos_token_ids=sampling.eos_token_ids,
            timeout_s=max(0.001, self._deadline - asyncio.get_running_loop().time()),
            hash_salt=self._tenant.salt,
            n=len(branch.choices),
            prompt_logprobs=resolved.prompt_logprobs if wants_prompt else None,
            stream_id=self._shared.stream_ids.take(len(branch.choices)),
        )
        dispatch.MergeFrom(self._prompt)
        return dispatch

    def _outcome(self, usage: inference_pb2.Usage) -> Outcome:
        total_s = time.monotonic() - self._received_at
        ttft_s = total_s if self._ttft_s is None else self._ttft_s
        timing = inference_pb2.Timing(ttft_s=ttft_s, total_s=total_s)
        return Outcome(usage=usage, route=self._route, timing=timing)

    @property
    def _ttft_s(self) -> float | None:
        first_at = self.log.first_token_at
        return None if first_at is None else first_at - self._received_at

    def _backoff_s(self, num_failures: int, error: BatonError) -> float:
        """Doubles with every failure, at least what the worker asked for, spread by chance."""
        backoff_s = max(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 1), error.retry_after_s)
        return min(backoff_s, _MAX_BACKOFF_S) * self._shared.rng.uniform(0.5, 1.0)

    def _log_failure(self, branch: _Branch, error: BatonError) -> None:
        event(
            logger,
            logging.WARNING,
            "attempt_failed",
            request_id=branch.worker_request_id,
            attempt=branch.num_attempts,
            error=f"{type(error).__name__}: {error.message}",
        )


async def _listed(token_ids: Sequence[int]) -> list[int]:
    """Of a message's field, in pieces, between which other streams have their turn."""
    listed: list[int] = []
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        listed += token_ids[start : start + _IDS_AT_ONCE]
    return listed


def _without_addresses(error: BatonError) -> BatonError:
    """What a client is told when attempts have failed: the log has where, and of what."""
    if isinstance(error, FailedPrecondition):
        return FailedPrecondition("the workers do not fit together; the router's log says why")
    if not isinstance(error, Unavailable):
        return error
    message = "the workers that served the request have failed; send it again"
    return Unavailable(message, retry_after_s=max(_FAILED_RETRY_S, error.retry_after_s))
