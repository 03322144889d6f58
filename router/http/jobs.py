"""What a parsed body asks of the router: one GenerateRequest for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from core.tokenizer import Tokenizer
from router.http.errors import HttpError
from router.http.parameters import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    Prompt,
    renamed_fields,
)
from router.validate import ModelLimits

MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat goes on to the model's end token."""

_IDS_AT_ONCE = 1 << 14
"""Token ids that are copied within a third of a millisecond."""
_FEW_IDS = 256
"""So many of each prompt take no turn of their own, however many prompts there are."""
_SAME_IN_PROTO = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class Job:
    """One HTTP request: each of `requests` is one prompt with `n` choices."""

    requests: Sequence[inference_pb2.GenerateRequest]
    n: int
    is_stream: bool
    includes_usage: bool
    """Whether a stream ends with a chunk that tells the usage."""
    wants_logprobs: bool
    num_top: int
    """How many of the likeliest tokens were asked for."""
    names: Mapping[str, str]
    """Parameters' names by field of GenerateRequest, where they differ."""
    echoed: Sequence[Prompt] | None = None
    """The prompts, when they are part of the answer."""
    drops_output: bool = False
    """Only the prompts are the answer: the one token that is generated is left out."""


def check_model(name: str, limits: ModelLimits) -> None:
    """Raises HttpError 404 for another model than the one that is served."""
    if name not in ("", limits.served_name):
        raise HttpError(
            404,
            f"the model {name[:64]!r} does not exist; this deployment serves "
            f"{limits.served_name!r}",
            code="model_not_found",
            param="model",
        )


async def completion_job(
    body: CompletionBody, request_id: str, tokenizer: Tokenizer, limits: ModelLimits
) -> Job:
    """Tokenizes prompts only where their own tokens are part of the answer."""
    if len(body.prompt) > MAX_PROMPTS:
        message = f"prompt has {len(body.prompt)} prompts; the limit is {MAX_PROMPTS}"
        raise HttpError(400, message, code="invalid_value", param="prompt")
    prompts = body.prompt
    scores_prompt = body.echo and body.logprobs is not None
    if scores_prompt:
        prompts = [
            await tokenizer.encode_prompt(prompt, limits.max_model_len)
            if isinstance(prompt, str) and prompt
            else prompt
            for prompt in prompts
        ]
    sampling = _sampling(body)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    drops_output = max_tokens == 0
    sampling.max_tokens = 1 if drops_output else max_tokens
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
    requests = []
    for index, prompt in enumerate(prompts):
        own_id = request_id if len(prompts) == 1 else f"{request_id}/{index}"
        request = _request(body, own_id, sampling)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            await _set_token_ids(request, prompt)
        if scores_prompt and body.logprobs is not None:
            request.prompt_logprobs = body.logprobs
        requests.append(request)
    return Job(
        requests=requests,
        n=body.n,
        is_stream=body.stream,
        includes_usage=_includes_usage(body),
        wants_logprobs=body.logprobs is not None,
        num_top=body.logprobs or 0,
        names=renamed_fields(body),
        echoed=body.prompt if body.echo else None,
        drops_output=drops_output,
    )


def chat_job(body: ChatBody, request_id: str) -> Job:
    sampling = _sampling(body)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    request = _request(body, request_id, sampling)
    if not body.messages:
        message = "messages is empty; it needs at least 1 message"
        raise HttpError(400, message, code="invalid_value", param="messages")
    request.messages.extend(chat_messages(body.messages))
    return Job(
        requests=[request],
        n=body.n,
        is_stream=body.stream,
        includes_usage=_includes_usage(body),
        wants_logprobs=body.logprobs,
        num_top=body.top_logprobs or 0,
        names=renamed_fields(body),
    )


def chat_messages(messages: Sequence[Message]) -> list[inference_pb2.ChatMessage]:
    """`developer` is the newer name of `system`, which chat templates know."""
    return [
        inference_pb2.ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content=message.content,
        )
        for message in messages
    ]


def _request(
    body: GenerationBody, request_id: str, sampling: types_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        request_id=request_id, model=body.model, sampling=sampling, n=body.n
    )
    if body.priority is not None:
        request.priority = body.priority
    return request


async def _set_token_ids(request: inference_pb2.GenerateRequest, token_ids: list[int]) -> None:
    """In pieces, between which other streams have their turn."""
    request.token_ids.SetInParent()
    try:
        for start in range(0, len(token_ids), _IDS_AT_ONCE):
            request.token_ids.ids.extend(token_ids[start : start + _IDS_AT_ONCE])
            if len(token_ids) > _FEW_IDS:
                await asyncio.sleep(0)
    except ValueError:
        message = "prompt has a token id that is outside every vocabulary"
        raise HttpError(400, message, code="invalid_value", param="prompt") from None


def _sampling(body: GenerationBody) -> types_pb2.SamplingParams:
    given = {name: value for name in _SAME_IN_PROTO if (value := getattr(body, name)) is not None}
    sampling = types_pb2.SamplingParams(
        **given,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logit_bias=body.logit_bias,
    )
    if body.seed is not None:
        # OpenAI's seeds may be negative; Baton's are the same 64 bits without a sign.
        sampling.seed = body.seed % 2**64
    return sampling


def _includes_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
