"""The JSON bodies that clients send, parameter by parameter.

Every parameter of OpenAI's protocol is a field here. One that Baton does not support is a
field that takes only the values which ask for nothing. Anything else is refused, and the
error names it. Ranges of values are judged in `router.validate`, as for gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)

from router.validate import MAX_LOGIT_BIASES

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Prompt = str | list[int]
EmptyList = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]


class Body(BaseModel):
    """A JSON object: types are not converted, unknown keys are refused, null is absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_token_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of token ids, or a list of strings or of such lists")


def _is_token_ids(value: Any) -> bool:
    # As a set of types: a long prompt is checked in C. A bool is not an id.
    return isinstance(value, list) and {int} == set(map(type, value))


def _token_id_keys(value: Any) -> Any:
    """JSON has only strings for keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(value)} keys; the limit is {MAX_LOGIT_BIASES}")
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"has the key {str(key)[:20]!r}, which is no token id")
    biases = {int(key): item for key, item in value.items()}
    if len(biases) < len(value):
        raise ValueError("has two keys for one token id, with and without leading zeros")
    return biases


def _content_text(value: Any) -> Any:
    """A string, or the text of a list of parts, joined as it is."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("must have at least 1 part")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"[{index}] must be an object with a type")
        if kind != "text":
            raise ValueError(f"[{index}] has the type {kind[:40]!r}; only 'text' is supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"[{index}] must have the keys type and text, and nothing else")
        texts.append(part["text"])
    return "".join(texts)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(Body):
    type: Literal["text"]


class Message(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_content_text)]
    name: None = None
    refusal: None = None
    audio: None = None
    tool_calls: EmptyList = []
    tool_call_id: None = None
    function_call: None = None


Messages = Annotated[list[Message], FailFast()]
"""A thousand wrong ones cost no more than the first."""


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str = ""
    n: Int32 = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_id_keys)] = {}
    seed: Seed | None = None
    stop: Annotated[list[str], FailFast(), BeforeValidator(_as_list)] = []
    user: str | None = None

    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Int32], FailFast()] = []
    priority: Int32 | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    echo: bool = False
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of is supported only when it equals n ({self.n})")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1; it may be 0 together with echo")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None

    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], FailFast()] = ["text"]
    tools: EmptyList = []
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = True
    functions: EmptyList = []
    function_call: Literal["none", "auto"] = "none"
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    moderation: None = None
    reasoning_effort: Literal["none"] = "none"
    verbosity: Literal["medium"] = "medium"
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    metadata: EmptyObject = {}
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Literal["in_memory"] = "in_memory"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_completion_tokens differs from max_tokens, its older name")
        return self


class TokenizeBody(Body):
    """POST /tokenize"""

    model: str = ""
    prompt: str | None = None
    messages: Messages = []
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if (self.prompt is None) == ("messages" not in self.model_fields_set):
            raise ValueError("prompt must be given, or messages, and not both")
        if self.prompt is None and not self.messages:
            raise ValueError("messages is empty; it needs at least 1 message")
        if self.prompt is None and not self.add_special_tokens:
            raise ValueError("add_special_tokens is of prompts: a chat template writes them itself")
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str = ""
    tokens: Annotated[list[Int32], FailFast()]


def renamed_fields(body: CompletionBody | ChatBody) -> Mapping[str, str]:
    """Fields of GenerateRequest that have another name in `body`."""
    names = {"request_id": "x-request-id"}
    if isinstance(body, CompletionBody):
        return names | {"token_ids": "prompt", "prompt_logprobs": "logprobs"}
    names["logprobs"] = "top_logprobs"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names
