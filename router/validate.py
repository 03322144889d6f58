"""Every rule that a GenerateRequest must keep.

    check_request (before tokenizing)  ->  check_prompt (with the prompt's tokens)

Pure: values in, values or InvalidArgument out. Each error names the field, the limit and
what was given. `router.resolve` makes the complete request of what has passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton.v1 import inference_pb2, types_pb2
from core.errors import ContextExceeded, InvalidArgument
from core.model_folder import DefaultSampling
from core.rpc import MAX_REQUEST_BYTES
from core.sampling import SamplingParams

MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PRIORITY = 1000
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_ADDITIVE_PENALTY = 2.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{0,128}")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ModelLimits:
    """What the deployment can do. `max_model_len` is the least of context and KV pools."""

    served_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: DefaultSampling


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with nothing left open."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    n: int = 1
    prompt_logprobs: int | None = None


def check_request_id(request_id: str) -> None:
    """Empty, or up to 128 visible ASCII characters."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument(
            "request_id must have at most 128 visible ASCII characters without spaces, got "
            f"{len(request_id)} characters",
            field="request_id",
        )


def check_defaults(limits: ModelLimits) -> None:
    """What the model's folder fills in keeps the rules, too. Raises InvalidArgument."""
    _check_sampling(types_pb2.SamplingParams(**asdict(limits.defaults)), limits)


def check_request(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """All rules that do not need the prompt's tokens."""
    _check_range(request, "n", 1, MAX_CHOICES)
    _check_range(request, "prompt_logprobs", 0, MAX_LOGPROBS)
    _check_range(request, "priority", -MAX_PRIORITY, MAX_PRIORITY)
    if request.model not in ("", limits.served_name):
        raise InvalidArgument(
            f"model {_short(request.model)} is unknown; this deployment serves "
            f"{limits.served_name!r}",
            field="model",
        )
    field = _check_input(request, limits)
    num_bytes = request.ByteSize()
    if num_bytes > MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"{field}: the request has {num_bytes} bytes; the limit is {MAX_REQUEST_BYTES}",
            field=field,
        )
    _check_sampling(request.sampling, limits)


def check_prompt(
    request: inference_pb2.GenerateRequest, prompt_token_ids: Sequence[int], limits: ModelLimits
) -> int:
    """All rules that do. Returns how many tokens of output there may be."""
    num_prompt = len(prompt_token_ids)
    field = input_field(request)
    if num_prompt == 0:
        raise InvalidArgument(f"{field} is empty: it has no tokens", field=field)
    check_prompt_length(field, num_prompt, limits.max_model_len)
    # A tokenizer may know more tokens than the model has embeddings.
    check_token_ids(field, prompt_token_ids, limits.vocab_size)
    room = limits.max_model_len - num_prompt
    given = request.sampling
    if given.HasField("max_tokens") and given.max_tokens > room:
        raise ContextExceeded(
            f"max_tokens is {given.max_tokens} and {field} has {num_prompt} tokens; together they "
            f"must not exceed the context length {limits.max_model_len}",
            field="max_tokens",
        )
    max_tokens = given.max_tokens if given.HasField("max_tokens") else room
    if given.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens must be between 0 and max_tokens ({max_tokens}), got {given.min_tokens}",
            field="min_tokens",
        )
    return max_tokens


def num_choices(request: inference_pb2.GenerateRequest) -> int:
    """How many answers `request` asks for; at most MAX_CHOICES and at least 1, as checked."""
    return min(max(1, request.n), MAX_CHOICES)


def input_field(request: inference_pb2.GenerateRequest) -> str:
    """Which of the three inputs is given."""
    given = _given_inputs(request)
    return given[0] if given else "prompt"


def _given_inputs(request: inference_pb2.GenerateRequest) -> list[str]:
    is_given = {
        "prompt": request.HasField("prompt"),
        "messages": bool(request.messages),
        "token_ids": request.HasField("token_ids"),
    }
    return [field for field, value in is_given.items() if value]


def check_prompt_length(field: str, num_prompt: int, max_model_len: int) -> None:
    """Raises ContextExceeded when there is no room for one token of output."""
    if num_prompt < max_model_len:
        return
    raise ContextExceeded(
        # Of a text that is much too long only a part has been counted.
        f"{field} has {num_prompt} tokens or more; the limit is {max_model_len - 1}, "
        f"so that an output token fits into the context length {max_model_len} "
        "(the model's, or as much as the KV pool holds)",
        field=field,
    )


def _check_input(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> str:
    """Exactly one input, not empty and not hopelessly long. Returns its field."""
    given = _given_inputs(request)
    if len(given) != 1:
        raise InvalidArgument(
            "exactly one of prompt, messages and token_ids must be given, got "
            f"{' and '.join(given) or 'none'}",
            field=given[0] if given else "prompt",
        )
    field = given[0]
    if field == "prompt" and not request.prompt:
        raise InvalidArgument("prompt is empty; it needs at least 1 character", field=field)
    if field == "messages":
        _check_messages(request.messages)
    if field == "token_ids":
        if not request.token_ids.ids:
            raise InvalidArgument("token_ids is empty; it needs at least 1 id", field=field)
        check_prompt_length(field, len(request.token_ids.ids), limits.max_model_len)
    return field


def _check_messages(messages: Sequence[inference_pb2.ChatMessage]) -> None:
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", field="messages"
        )
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role is empty", field="messages")


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index, token_id = next(
        (index, token_id) for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size
    )
    raise InvalidArgument(
        f"{field}[{index}] is {token_id}, outside the vocabulary of {vocab_size} tokens "
        f"(0 to {vocab_size - 1})",
        field=field,
    )


def _check_sampling(given: types_pb2.SamplingParams, limits: ModelLimits) -> None:
    _check_range(given, "max_tokens", 1, limits.max_model_len)
    _check_range(given, "min_tokens", 0, limits.max_model_len)
    _check_range(given, "temperature", 0, MAX_TEMPERATURE)
    _check_range(given, "top_p", 0, 1, excludes_low=True)
    _check_range(given, "top_k", 0, _INT32_MAX)
    _check_range(given, "min_p", 0, 1)
    _check_range(given, "repetition_penalty", 0, MAX_REPETITION_PENALTY, excludes_low=True)
    for name in ("presence_penalty", "frequency_penalty"):
        _check_range(given, name, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    _check_range(given, "logprobs", 0, MAX_LOGPROBS)
    _check_logit_bias(given, limits.vocab_size)
    _check_stops(given, limits.vocab_size)


def _check_logit_bias(given: types_pb2.SamplingParams, vocab_size: int) -> None:
    if len(given.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidArgument(
            f"logit_bias has {len(given.logit_bias)} entries; the limit is {MAX_LOGIT_BIASES}",
            field="logit_bias",
        )
    for token_id, bias in given.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(
                f"logit_bias names token {token_id}, outside the vocabulary of {vocab_size} tokens",
                field="logit_bias",
            )
        if not abs(bias) <= MAX_LOGIT_BIAS:
            raise InvalidArgument(
                f"logit_bias of token {token_id} must be from {-MAX_LOGIT_BIAS:g} to "
                f"{MAX_LOGIT_BIAS:g}, got {bias:g}",
                field="logit_bias",
            )


def _check_range(
    given: inference_pb2.GenerateRequest | types_pb2.SamplingParams,
    field: str,
    low: float,
    high: float,
    *,
    excludes_low: bool = False,
) -> None:
    if not given.HasField(field):  # type: ignore[arg-type]
        return
    value = getattr(given, field)
    is_low_enough = value > low if excludes_low else value >= low
    # NaN fails every comparison; infinity is above every limit.
    if math.isfinite(value) and is_low_enough and value <= high:
        return
    above = f"greater than {low} and at most {high}" if excludes_low else f"from {low} to {high}"
    raise InvalidArgument(f"{field} must be {above}, got {value:g}", field=field)


def _check_stops(given: types_pb2.SamplingParams, vocab_size: int) -> None:
    if len(given.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"stop has {len(given.stop)} strings; the limit is {MAX_STOP_STRINGS}", field="stop"
        )
    for index, stop in enumerate(given.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidArgument(
                f"stop[{index}] has {len(stop)} characters; it needs 1 to {MAX_STOP_CHARS}",
                field="stop",
            )
    if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            f"stop_token_ids has {len(given.stop_token_ids)} ids; the limit is "
            f"{MAX_STOP_TOKEN_IDS}",
            field="stop_token_ids",
        )
    check_token_ids("stop_token_ids", given.stop_token_ids, vocab_size)


def _short(value: str) -> str:
    return repr(value if len(value) <= 64 else value[:61] + "...")
