"""What a caller may say about one request, and the protobuf request made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from baton.v1 import inference_pb2, types_pb2
from core.errors import InvalidArgument

DEFAULT_SERVER = "127.0.0.1:50051"

_GENERATE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name["Generate"]
_RETRY_CANCELLED = {
    "name": [{"service": _GENERATE.containing_service.full_name, "method": _GENERATE.name}],
    "retryPolicy": {
        "maxAttempts": 3,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["CANCELLED"],
    },
}
CHANNEL_OPTIONS = (("grpc.service_config", json.dumps({"methodConfig": [_RETRY_CANCELLED]})),)
"""A router that stops may cancel a call that has just come in. gRPC sends it again as long as
nothing was answered, within its deadline: nobody can tell that from a call that came later."""

MAX_TIMEOUT_S = 1_000_000
"""Beyond it, clocks overflow into the past: gRPC takes an endless timeout for one that is over."""


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`. Meaning and ranges: `SamplingParams` in types.proto.

    One of prompt (the first positional argument), `messages` and `token_ids` is the input.
    What is left out, or None, takes the model's or the server's default.
    """

    messages: Sequence[Mapping[str, str]] | None  # each {"role": …, "content": …}
    token_ids: Sequence[int] | None
    model: str | None
    request_id: str | None  # a second call with the same id joins the first
    timeout_s: float | None
    traceparent: str | None  # of W3C Trace Context: the caller's span
    n: int | None  # answers to the prompt, which is computed once
    prompt_logprobs: int | None  # of the prompt's tokens, each with so many of the likeliest

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None


_REQUEST_FIELDS = ("model", "request_id", "n", "prompt_logprobs")
_INPUT_FIELDS = ("messages", "token_ids")
_OTHER_FIELDS = ("timeout_s", "traceparent")
_SAMPLING_FIELDS = frozenset(GenerateOptions.__annotations__).difference(
    _REQUEST_FIELDS, _INPUT_FIELDS, _OTHER_FIELDS
)


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries. Raises InvalidArgument."""
    if api_key is None:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument("api_key must be printable ASCII", field="api_key")
    return (("authorization", f"Bearer {api_key}"),)


def trace_metadata(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a call carries whose caller is traced. Raises InvalidArgument."""
    traceparent = options.get("traceparent")
    if traceparent is None:
        return ()
    if not (isinstance(traceparent, str) and traceparent.isascii() and traceparent.isprintable()):
        raise InvalidArgument("traceparent must be printable ASCII", field="traceparent")
    return (("traceparent", traceparent),)


def build_request(
    prompt: str | None, options: Mapping[str, Any]
) -> tuple[inference_pb2.GenerateRequest, float | None]:
    """The request and its timeout in seconds.

    The server judges ranges; here only what protobuf cannot carry is refused, with
    InvalidArgument. An option that does not exist is a TypeError, as with any function.
    """
    for name in options:
        if name not in GenerateOptions.__annotations__:
            raise TypeError(f"unknown option {name!r}")
    request = inference_pb2.GenerateRequest()
    if prompt is not None:
        _set(request, "prompt", prompt)
    for name in _REQUEST_FIELDS:
        if options.get(name) is not None:
            _set(request, name, options[name])
    for message in options.get("messages") or ():
        _set(request, "messages", message)
    if options.get("token_ids") is not None:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", options["token_ids"], shown_as="token_ids")
    for name in _SAMPLING_FIELDS:
        if options.get(name) is not None:
            _set(request.sampling, name, options[name])
    timeout_s: float | None = options.get("timeout_s")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(
            f"timeout_s must be over 0 and at most {MAX_TIMEOUT_S}, not {timeout_s}",
            field="timeout_s",
        )
    return request, timeout_s


def _set(
    message: inference_pb2.GenerateRequest | inference_pb2.TokenIds | types_pb2.SamplingParams,
    name: str,
    value: Any,
    shown_as: str = "",
) -> None:
    """Sets or extends one field; what protobuf refuses becomes InvalidArgument."""
    try:
        if name == "messages":
            message.messages.add(**value)  # type: ignore[union-attr]
        elif name in ("ids", "stop", "stop_token_ids"):
            # A string is a sequence of strings too, which nobody means by one.
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, UnicodeError) as error:
        field = shown_as or name
        raise InvalidArgument(f"{field}: {error}", field=field) from None
