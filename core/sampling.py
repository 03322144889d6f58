"""How the next token is chosen: the resolved form, every default filled in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton.v1 import types_pb2


@dataclass(frozen=True)
class SamplingParams:
    """Resolved sampling parameters of one request. Meaning and ranges: types.proto.

    `seed` is always set: a token depends on (seed, output index) and the logits, never on
    what else is in the batch. `eos_token_ids` is empty when the request ignores them.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def to_proto(self) -> types_pb2.SamplingParams:
        """For a Dispatch; `eos_token_ids` travel beside it."""
        return types_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.logprobs,
            logit_bias=dict(self.logit_bias),
        )

    @classmethod
    def from_proto(
        cls, message: types_pb2.SamplingParams, eos_token_ids: tuple[int, ...]
    ) -> SamplingParams:
        """Reads a complete message, as a Dispatch carries it."""
        return cls(
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            seed=message.seed,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            stop_token_ids=tuple(message.stop_token_ids),
            eos_token_ids=eos_token_ids,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            logit_bias=tuple(sorted(message.logit_bias.items())),
        )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's n choices; choice 0 draws as the request alone would."""
    if choice == 0:
        return seed
    data = seed.to_bytes(8, "big") + choice.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
