"""A sequence: one request's tokens, status and block table inside one engine.

Only the thread that owns the scheduler changes a sequence. The runner reads, without a lock, what
does not change while a step is planned and run: the prompt, the parameters of sampling, tokens
that were known. All else comes with the step (`engine.batch.ScheduledSequence`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from core.sampling import SamplingParams

SequenceKey = tuple[str, int, int]
"""(request_id, attempt, choice)."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(eq=False)
class Sequence:
    """One of a request's choices in one engine.

    `num_computed_tokens` counts the leading tokens whose KV stands in the blocks of
    `block_table`; the next forward pass begins there. The KV of the newest token is written
    by the step that consumes it, so a decoding sequence has `num_tokens - 1` computed.
    """

    request_id: str
    attempt: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    scope: bytes
    """Seed of the block hash chain (core.hashing.scope_hash)."""
    choice: int = 0
    sibling_seeds: tuple[int, ...] = ()
    """With the first output, one more is drawn from the same logits for each of these: for
    choices that go on from the same prompt."""
    num_prompt_logprobs: int | None = None
    """Set: the prompt is computed whole, with log-probabilities and so many of the likeliest."""
    output_token_ids: list[int] = field(default_factory=list)
    num_prior_outputs: int = 0
    """Leading `output_token_ids` that an earlier attempt gave to the client."""
    block_table: list[int] = field(default_factory=list)
    copy_source: int | None = None
    """A block whose content the next step copies to the one where that step writes, which is
    the sequence's own. Until then a reference of the source is the sequence's, too."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks so far; the scheduler extends it."""
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    """Leading tokens that are computed, or will be by the steps on the device. It reaches
    `num_tokens` when one of them yields the next token; the scheduler keeps it."""
    num_cached_tokens: int = 0
    """Tokens that the prefix cache provided when the sequence was first admitted."""
    num_preemptions: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = 0
    """Order of arrival; the scheduler sets it. Preemption takes the latest first."""

    @property
    def key(self) -> SequenceKey:
        return (self.request_id, self.attempt, self.choice)

    @property
    def request_key(self) -> tuple[str, int]:
        """(request_id, attempt), which all choices of a dispatch have in common."""
        return (self.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_in_flight(self) -> bool:
        """Whether a step on the device computes tokens of it."""
        return self.num_scheduled_tokens > self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def token_slice(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
