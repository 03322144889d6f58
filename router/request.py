"""One request's life in the router: resolve, then attempts until it has an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from dataclasses import dataclass, replace

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.chat_template import ChatMessage
from core.errors import (
    BatonError,
    DeadlineExceeded,
    Unavailable,
    status_of,
)
from core.logs import event
from core.tasks import TaskSet
from core.tokenizer import Tokenizer
from router.dispatch import Attempt, AttemptFailed, AttemptPreempted, Placement
from router.output_text import OutputText
from router.outputs import OutputLog
from router.placement import Placer
from router.validate import (
    ModelLimits,
    ResolvedRequest,
    check_request,
    complete_request,
    input_field,
)

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Attempts that may fail; those that decode preempts do not count."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True)
class Generation:
    """What every request of this router shares."""

    router_id: str
    tokenizer: Tokenizer
    limits: ModelLimits
    """With the model's own context length; the pool may know a shorter one."""
    placer: Placer
    worker_wait_s: float
    """How long a request waits in all while no worker of a role is ready."""
    tasks: TaskSet
    rng: random.Random

    def current_limits(self) -> ModelLimits:
        """The model's limits or, if less, what the attached workers can hold."""
        pool_len = self.placer.pool.max_model_len
        if pool_len is None or pool_len >= self.limits.max_model_len:
            return self.limits
        return replace(self.limits, max_model_len=pool_len)


class RequestRun:
    """Produces the outputs of one request into `log`.

    `worker_request_id` is unique in the life of the whole deployment, unlike the client's
    id: workers must not confuse two requests. `deadline` is in the event loop's time.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        worker_request_id: str,
        deadline: float,
        shared: Generation,
    ) -> None:
        self.log = OutputLog(request.request_id)
        self._request = request
        self._worker_request_id = worker_request_id
        self._deadline = deadline
        self._shared = shared
        self._received_at = time.monotonic()
        self._first_token_at: float | None = None
        self._worker_wait_s = shared.worker_wait_s

    async def run(self) -> None:
        """Ends with the log finished or failed; raises only CancelledError."""
        try:
            async with asyncio.timeout_at(self._deadline):
                resolved = await self._resolve()
                self.log.finish(await self._generate(resolved))
        except asyncio.CancelledError:
            # Who still listens now hears it because the router stops.
            self.log.fail(Unavailable("the router is shutting down"))
            raise
        except TimeoutError:
            self.log.fail(DeadlineExceeded("the request's time is over"))
        except Exception as error:
            self.log.fail(error)

    async def _resolve(self) -> ResolvedRequest:
        limits = self._shared.current_limits()
        check_request(self._request, limits)
        token_ids = await self._tokenize(limits.max_model_len)
        return complete_request(
            self._request, token_ids, limits, drawn_seed=self._shared.rng.getrandbits(63)
        )

    async def _tokenize(self, max_tokens: int) -> list[int]:
        request, tokenizer = self._request, self._shared.tokenizer
        field = input_field(request)
        if field == "prompt":
            return await tokenizer.encode_prompt(request.prompt, max_tokens)
        if field == "messages":
            messages = [ChatMessage(item.role, item.content) for item in request.messages]
            return await tokenizer.encode_chat(messages, max_tokens)
        return list(request.token_ids.ids)

    async def _generate(self, resolved: ResolvedRequest) -> inference_pb2.GenerateResponse:
        """Attempts until one has an outcome. Returns the last message."""
        text = OutputText(
            self.log,
            self._shared.tokenizer.detokenizer(),
            resolved.stop,
            resolved.sampling.min_tokens,
        )
        avoid: frozenset[str] = frozenset()
        num_failures = 0
        for number in itertools.count(1):
            try:
                return await self._attempt(resolved, number, text, avoid)
            except AttemptPreempted:
                continue
            except AttemptFailed as failure:
                error = failure.error
                avoid |= failure.suspects
            num_failures += 1
            self._log_failure(number, error)
            if not status_of(error).retryable or num_failures == MAX_FAILURES:
                raise error
            await asyncio.sleep(self._backoff_s(num_failures, error))
        raise AssertionError("unreachable")

    async def _attempt(
        self,
        resolved: ResolvedRequest,
        number: int,
        text: OutputText,
        avoid: frozenset[str],
    ) -> inference_pb2.GenerateResponse:
        """One attempt. Raises AttemptFailed or AttemptPreempted."""
        placement = await self._place([*resolved.prompt_token_ids, *self.log.token_ids], avoid)

        def receive(output: worker_pb2.SequenceOutput) -> bool:
            if self._first_token_at is None and output.token_ids:
                self._first_token_at = time.monotonic()
            return text.add(output)

        attempt = Attempt(self._dispatch(resolved, number), placement, receive, self._shared.tasks)
        reason = await attempt.run()
        route = inference_pb2.Route(
            prefill_worker=placement.prefill.worker_id,
            decode_worker=placement.decode.worker_id,
            cached_tokens=attempt.cached_tokens,
            transferred_blocks=attempt.transferred_blocks,
            attempts=number,
        )
        return self._last_message(resolved, reason, route, text.flush())

    async def _place(self, token_ids: list[int], avoid: frozenset[str]) -> Placement:
        """Waits for a worker of each role, since one that has died may soon be replaced.

        Raises Unavailable when the request has waited for as long as it may.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._shared.placer.place(token_ids, avoid)
            except Unavailable:
                if self._worker_wait_s <= 0:
                    raise
            began_at = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._worker_wait_s):
                    await self._shared.placer.pool.wait_changed()
            self._worker_wait_s -= loop.time() - began_at

    def _dispatch(self, resolved: ResolvedRequest, number: int) -> worker_pb2.Dispatch:
        return worker_pb2.Dispatch(
            request_id=self._worker_request_id,
            attempt=number,
            router_id=self._shared.router_id,
            prompt_token_ids=resolved.prompt_token_ids,
            output_token_ids=self.log.token_ids,
            sampling=resolved.sampling.to_proto(),
            eos_token_ids=resolved.sampling.eos_token_ids,
            timeout_s=max(0.001, self._deadline - asyncio.get_running_loop().time()),
        )

    def _last_message(
        self,
        resolved: ResolvedRequest,
        reason: types_pb2.FinishReason.ValueType,
        route: inference_pb2.Route,
        rest: str,
    ) -> inference_pb2.GenerateResponse:
        now = time.monotonic()
        first = now if self._first_token_at is None else self._first_token_at
        return inference_pb2.GenerateResponse(
            text=rest,
            finish_reason=reason,
            usage=inference_pb2.Usage(
                prompt_tokens=len(resolved.prompt_token_ids),
                completion_tokens=len(self.log.token_ids),
            ),
            route=route,
            timing=inference_pb2.Timing(
                ttft_s=first - self._received_at, total_s=now - self._received_at
            ),
        )

    def _backoff_s(self, num_failures: int, error: BatonError) -> float:
        """Doubles with every failure, at least what the worker asked for, spread by chance."""
        backoff_s = max(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 1), error.retry_after_s)
        return min(backoff_s, _MAX_BACKOFF_S) * self._shared.rng.uniform(0.5, 1.0)

    def _log_failure(self, number: int, error: BatonError) -> None:
        event(
            logger,
            logging.WARNING,
            "attempt_failed",
            request_id=self._worker_request_id,
            attempt=number,
            error=f"{type(error).__name__}: {error.message}",
        )
