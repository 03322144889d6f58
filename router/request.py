"""One request's life in the router: resolve, be admitted, then attempts until it has an outcome."""

from __future__ import annotations

import asyncio
import logging
import time

from baton.v1 import inference_pb2, worker_pb2
from core.errors import (
    BatonError,
    DeadlineExceeded,
    ResourceExhausted,
    Unavailable,
    from_exception,
)
from router.admission import Ticket
from router.admission_refusals import Demand
from router.attempts import Attempts
from router.choice import Choice, Pace
from router.fallback import FALLBACK_NAME
from router.generation import Generation
from router.outputs import Outcome, OutputLog
from router.quotas import Charge
from router.request_context import RequestContext
from router.request_spans import end_request
from router.resolve import resolve
from router.validate import ResolvedRequest, num_choices

logger = logging.getLogger(__name__)


class RequestRun:
    """Produces the outputs of one request into `log`."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, context: RequestContext, shared: Generation
    ) -> None:
        self.log = OutputLog(num_choices(request))
        self._request = request
        self._context = context
        self._shared = shared
        self._received_at = time.monotonic()
        self._route = inference_pb2.Route()
        self._prompt = worker_pb2.Dispatch()
        """The prompt's tokens, as dispatches say them."""

    async def run(self) -> None:
        """Ends with the log finished or failed; raises only CancelledError."""
        try:
            async with asyncio.timeout_at(self._context.deadline):
                resolved, self._prompt = await resolve(self._request, self._shared)
                usage = await self._serve(resolved)
                self.log.finish(self._outcome(usage))
        except asyncio.CancelledError:
            # Who still listens now hears it because the router stops.
            self.log.fail(Unavailable("the router is shutting down"))
            raise
        except TimeoutError:
            self.log.fail(DeadlineExceeded("the request's time is over"))
        except BatonError as error:
            self.log.fail(error)
        except Exception as error:
            logger.error("request %s failed", self._context.worker_request_id, exc_info=error)
            self.log.fail(from_exception(error))
        finally:
            # What is remembered of a request is its answer.
            self._prompt.Clear()

    def end_span(self, cancelled: str | None = None) -> None:
        """Ends the request's span; `cancelled`: why nobody wants the request any more."""
        end_request(self._context.span, self.log, self._route, self._ttft_s, cancelled)

    async def _serve(self, resolved: ResolvedRequest) -> inference_pb2.Usage:
        """By this deployment's workers or, where they cannot, by the fallback."""
        admission, demand = self._shared.admission, self._demand(resolved)
        num_tokens = demand.num_prompt_tokens + admission.forecaster.num_outputs(demand)
        self._context.span.set({"gen_ai.usage.input_tokens": demand.num_prompt_tokens})
        async with admission.quota(self._context.tenant, demand.request_id, num_tokens) as charge:
            try:
                with self._context.span.child("router.admission"):
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
            usage = await fallback.instead(
                refusal, self._context.tenant, self._request, resolved, log
            )
        finally:
            if log.first_token_at is not None and not log.num_tokens:
                # There is text of the endpoint, which has not told its usage yet.
                charge.num_used = charge.num_tokens
        charge.num_used = usage.prompt_tokens + usage.completion_tokens or charge.num_tokens
        self._route = inference_pb2.Route(decode_worker=FALLBACK_NAME, attempts=1)
        return usage

    def _demand(self, resolved: ResolvedRequest) -> Demand:
        return Demand(
            request_id=self._context.worker_request_id,
            tenant=self._context.tenant,
            num_prompt_tokens=len(resolved.prompt_token_ids),
            max_tokens=resolved.sampling.max_tokens,
            num_choices=resolved.n,
            priority=self._request.priority,
            time_left_s=self._context.time_left_s(),
        )

    async def _generate(self, resolved: ResolvedRequest, ticket: Ticket) -> None:
        tokenizer = self._shared.tokenizer
        pace = Pace(self._received_at, self._shared.metrics)
        choices = [
            Choice(index, self.log, tokenizer.detokenizer(), resolved, pace)
            for index in range(resolved.n)
        ]
        attempts = Attempts(resolved, self._prompt, self._context, self._shared, self.log)
        self._route = attempts.route
        await attempts.run(choices, ticket)

    def _outcome(self, usage: inference_pb2.Usage) -> Outcome:
        total_s = time.monotonic() - self._received_at
        ttft_s = total_s if self._ttft_s is None else self._ttft_s
        timing = inference_pb2.Timing(ttft_s=ttft_s, total_s=total_s)
        return Outcome(usage=usage, route=self._route, timing=timing)

    @property
    def _ttft_s(self) -> float | None:
        first_at = self.log.first_token_at
        return None if first_at is None else first_at - self._received_at
