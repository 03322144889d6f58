"""An OpenAI-compatible endpoint elsewhere, for when no pod can serve: text in, text out.

Its tokens are not this model's, so requests that speak of tokens (ids, log-probabilities, a
vocabulary's biases) and settings that the OpenAI protocol does not have are not for it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import httpx2

from baton.v1 import inference_pb2, types_pb2
from core.errors import BatonError, Unavailable
from core.logs import event
from router.outputs import OutputLog
from router.quotas import is_over_quota
from router.tenants import ClassName, Tenant
from router.validate import ResolvedRequest

logger = logging.getLogger(__name__)

FALLBACK_NAME = "fallback"
"""As `route.decode_worker`."""
_CONNECT_TIMEOUT_S = 5.0
_FINISH_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
}
_HONOURED = frozenset(
    ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop")
)


@dataclass(frozen=True)
class FallbackConfig:
    """`url` ends before `/completions`, as in `https://host/v1`."""

    url: str
    api_key: str | None
    model: str
    classes: frozenset[ClassName]


class Fallback:
    """Without a `config` it takes nothing. Close it. `transport` replaces the network."""

    def __init__(
        self, config: FallbackConfig | None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._config = config
        self._client: httpx2.AsyncClient | None = None
        self.num_answers = 0
        if config is None:
            return
        self._client = httpx2.AsyncClient(
            base_url=config.url.rstrip("/") + "/",
            headers={"authorization": f"Bearer {config.api_key}"} if config.api_key else {},
            # The request's own deadline bounds the rest.
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=transport,
        )

    def takes(self, tenant: Tenant, request: inference_pb2.GenerateRequest) -> bool:
        """Whether the endpoint can honour all that `request` asks for."""
        if self._config is None or tenant.class_name not in self._config.classes:
            return False
        given = {field.name for field, _ in request.sampling.ListFields()}
        is_text = not request.HasField("token_ids") and not request.HasField("prompt_logprobs")
        return is_text and given <= _HONOURED

    async def instead(
        self,
        refusal: BatonError,
        tenant: Tenant,
        request: inference_pb2.GenerateRequest,
        resolved: ResolvedRequest,
        log: OutputLog,
    ) -> inference_pb2.Usage:
        """Streams the answer into `log`, every choice to its end.

        Raises `refusal` when this is not for the fallback, or it gives nothing; Unavailable
        when it breaks off.
        """
        has_begun = log.first_token_at is not None
        if has_begun or is_over_quota(refusal) or not self.takes(tenant, request):
            raise refusal.bare()
        try:
            return await self._answer(request, resolved, log)
        except Unavailable:
            if log.first_token_at is not None:
                raise
            raise refusal.bare() from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _answer(
        self, request: inference_pb2.GenerateRequest, resolved: ResolvedRequest, log: OutputLog
    ) -> inference_pb2.Usage:
        assert self._config is not None and self._client is not None
        path, body = _call(request, resolved, self._config.model)
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != httpx2.codes.OK:
                    raise ValueError(f"status {response.status_code}")
                usage = await _read(response, log)
            if not all(choice.is_finished for choice in log.choices):
                raise ValueError("the answer has no end")
        except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            event(logger, logging.WARNING, "fallback_failed", error=error)
            raise Unavailable("the fallback broke off; send the request again") from error
        self.num_answers += 1
        return usage


def _call(
    request: inference_pb2.GenerateRequest, resolved: ResolvedRequest, model: str
) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    sampling = resolved.sampling
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": resolved.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    # A chat that names no limit may go on to the end of that model's context, not of this one's;
    # completions would then end after OpenAI's 16 tokens.
    if request.sampling.HasField("max_tokens") or request.HasField("prompt"):
        body["max_tokens"] = sampling.max_tokens
    if request.sampling.HasField("seed"):
        body["seed"] = sampling.seed
    if resolved.stop:
        body["stop"] = list(resolved.stop)
    if request.HasField("prompt"):
        return "completions", body | {"prompt": request.prompt}
    messages = [{"role": item.role, "content": item.content} for item in request.messages]
    return "chat/completions", body | {"messages": messages}


async def _read(response: httpx2.Response, log: OutputLog) -> inference_pb2.Usage:
    """Takes events in until the last."""
    usage = inference_pb2.Usage()
    async for message in httpx2.EventSource(response):
        if message.data == "[DONE]":
            break
        content = json.loads(message.data)
        if "error" in content:
            raise ValueError(content["error"])
        for choice in content["choices"]:
            _take(choice, log)
        counts = content.get("usage")
        if counts:
            usage.prompt_tokens = counts["prompt_tokens"]
            usage.completion_tokens = counts["completion_tokens"]
    return usage


def _take(choice: dict[str, Any], log: OutputLog) -> None:
    own = log.choices[choice.get("index", 0)]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    if text:
        # JSON can have halves of surrogate pairs, which are no text.
        own.append_text(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    reason = choice.get("finish_reason")
    if reason:
        own.finish(_FINISH_REASONS.get(reason, types_pb2.FINISH_REASON_STOP))
