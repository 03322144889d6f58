"""What a request gives back: chunks while it runs, one `Completion` in the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from baton.v1 import inference_pb2, types_pb2
from core.errors import Unavailable

FinishReason = Literal["stop", "length"]

_FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Route:
    """Which workers served the request, and what it did not have to compute or move."""

    prefill_worker: str
    decode_worker: str
    cached_tokens: int
    transferred_blocks: int
    attempts: int


@dataclass(frozen=True)
class Timing:
    """Seconds as the router saw them, from receiving the request."""

    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of one token, and of the likeliest ones at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


@dataclass(frozen=True)
class Chunk:
    """One message of a stream. `text` may be empty; what is None comes with the choice's last
    one, and `usage`, `route` and `timing` with the last of all."""

    request_id: str
    text: str
    token_ids: list[int]
    output_index: int
    logprobs: list[TokenLogprobs]
    choice: int = 0
    """Which of the request's n answers it belongs to."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """In the first messages, if asked for: one for each prompt token but the first."""
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    route: Route | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class Choice:
    """One of the answers to a prompt."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Completion:
    """A finished request. What is said of one answer is said of the first."""

    request_id: str
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs]
    usage: Usage
    route: Route
    timing: Timing

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass
class Assembler:
    """Puts the chunks of one stream together."""

    chunks: list[Chunk] = field(default_factory=list)

    def add(self, message: inference_pb2.GenerateResponse) -> Chunk:
        """Takes the next message and returns it as a chunk."""
        chunk = _chunk(message)
        self.chunks.append(chunk)
        return chunk

    def completion(self) -> Completion:
        """The whole. Raises Unavailable when the last message has not come."""
        last = self.chunks[-1] if self.chunks else None
        if not (last and last.usage and last.route and last.timing):
            raise Unavailable("the stream ended before the request was finished")
        num_choices = 1 + max(chunk.choice for chunk in self.chunks)
        return Completion(
            request_id=last.request_id,
            choices=[self._choice(number) for number in range(num_choices)],
            prompt_logprobs=[entry for chunk in self.chunks for entry in chunk.prompt_logprobs],
            usage=last.usage,
            route=last.route,
            timing=last.timing,
        )

    def _choice(self, number: int) -> Choice:
        chunks = [chunk for chunk in self.chunks if chunk.choice == number]
        reason = next((chunk.finish_reason for chunk in chunks if chunk.finish_reason), None)
        if reason is None:
            raise Unavailable("the stream ended before the request was finished")
        return Choice(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            logprobs=[entry for chunk in chunks for entry in chunk.logprobs],
            finish_reason=reason,
        )


def _chunk(message: inference_pb2.GenerateResponse) -> Chunk:
    chunk = Chunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=list(message.token_ids),
        output_index=message.output_index,
        logprobs=[_logprobs(entry) for entry in message.logprobs],
        choice=message.choice,
        prompt_logprobs=[_logprobs(entry) for entry in message.prompt_logprobs],
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
    )
    if not message.HasField("usage"):
        return chunk
    usage, route, timing = message.usage, message.route, message.timing
    return replace(
        chunk,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens),
        route=Route(
            prefill_worker=route.prefill_worker,
            decode_worker=route.decode_worker,
            cached_tokens=route.cached_tokens,
            transferred_blocks=route.transferred_blocks,
            attempts=route.attempts,
        ),
        timing=Timing(timing.ttft_s, timing.total_s),
    )


def _logprobs(entry: types_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
