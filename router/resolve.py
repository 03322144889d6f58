"""A request as its client sent it → one with nothing left open.

    check what needs no tokens → tokenize → check the rest → fill in what is not given

What takes long runs in a thread or in pieces, so that other streams have their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.sampling import SamplingParams
from core.tokenizer import Tokenizer
from router.generation import Generation
from router.validate import (
    ModelLimits,
    ResolvedRequest,
    check_prompt,
    check_request,
    input_field,
    num_choices,
)

_IDS_AT_ONCE = 1 << 14
"""Token ids that are read or checked in less than a millisecond."""


async def resolve(
    request: inference_pb2.GenerateRequest, shared: Generation
) -> tuple[ResolvedRequest, worker_pb2.Dispatch]:
    """The complete request, and what every dispatch says of its prompt's tokens: to list them
    takes long, to copy not. Raises InvalidArgument or ContextExceeded."""
    limits = shared.current_limits()
    check_request(request, limits)
    token_ids = await _tokenize(request, shared.tokenizer, limits.max_model_len)
    complete = partial(_complete, request, token_ids, limits, shared.rng.getrandbits(63))
    if len(token_ids) <= _IDS_AT_ONCE:
        return complete()
    return await asyncio.to_thread(complete)


async def _tokenize(
    request: inference_pb2.GenerateRequest, tokenizer: Tokenizer, max_tokens: int
) -> list[int]:
    field = input_field(request)
    if field == "prompt":
        return await tokenizer.encode_prompt(request.prompt, max_tokens)
    if field == "messages":
        return await tokenizer.encode_chat(request.messages, max_tokens)
    return await _listed(request.token_ids.ids)


async def _listed(token_ids: Sequence[int]) -> list[int]:
    """Of a message's field, in pieces, between which other streams have their turn."""
    listed: list[int] = []
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        listed += token_ids[start : start + _IDS_AT_ONCE]
    return listed


def _complete(
    request: inference_pb2.GenerateRequest,
    token_ids: Sequence[int],
    limits: ModelLimits,
    drawn_seed: int,
) -> tuple[ResolvedRequest, worker_pb2.Dispatch]:
    resolved = complete_request(request, token_ids, limits, drawn_seed)
    return resolved, worker_pb2.Dispatch(prompt_token_ids=token_ids)


def complete_request(
    request: inference_pb2.GenerateRequest,
    prompt_token_ids: Sequence[int],
    limits: ModelLimits,
    drawn_seed: int,
) -> ResolvedRequest:
    """Checks what depends on the prompt's tokens and fills in every default. Pure."""
    max_tokens = check_prompt(request, prompt_token_ids, limits)
    return ResolvedRequest(
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_complete_sampling(request.sampling, max_tokens, limits, drawn_seed),
        stop=tuple(request.sampling.stop),
        n=num_choices(request),
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
    )


def _complete_sampling(
    given: types_pb2.SamplingParams, max_tokens: int, limits: ModelLimits, drawn_seed: int
) -> SamplingParams:
    defaults = limits.defaults

    def pick(name: str, default: float) -> float:
        return float(getattr(given, name)) if given.HasField(name) else default  # type: ignore[arg-type]

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        temperature=pick("temperature", defaults.temperature),
        top_p=pick("top_p", defaults.top_p),
        top_k=given.top_k if given.HasField("top_k") else defaults.top_k,
        min_p=pick("min_p", defaults.min_p),
        seed=given.seed if given.HasField("seed") else drawn_seed,
        repetition_penalty=pick("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        stop_token_ids=tuple(given.stop_token_ids),
        eos_token_ids=() if given.ignore_eos else limits.eos_token_ids,
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        logit_bias=tuple(sorted(given.logit_bias.items())),
    )
