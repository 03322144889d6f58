"""What passes between the scheduler (bookkeeping) and the runner (device): one step.

schedule() -> StepBatch -> ModelRunner.execute() -> StepResult -> postprocess()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.graphs import GraphKey
from engine.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """Computes tokens [start, start + num_tokens) of `sequence` in this step.

    `samples` is true when the last of them is the sequence's newest token, so that the step
    yields a next one; a chunk that ends inside the prompt yields none.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepBatch:
    """One step. `sequences` are in the order in which results come back."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.sequences)

    @property
    def is_decode_only(self) -> bool:
        return all(item.num_tokens == 1 and item.samples for item in self.sequences)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the model's own distribution for one output token."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """`tokens[i]` belongs to the batch's i-th sequence; None where it does not sample, and where
    it should but its logits are not finite: such a sequence cannot go on."""

    tokens: tuple[SampledToken | None, ...]
    siblings: Mapping[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    """By the same index: a token for each of `Sequence.sibling_seeds`."""
    prompt_logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)
    """By the same index: of the prompt tokens that follow those computed, where asked for."""
    graph: GraphKey | None = None
    """The one that the step was replayed in."""


def broken_sequences(batch: StepBatch, result: StepResult) -> list[Sequence]:
    """Those that should have got a token and have none, since their logits are not finite."""
    pairs = zip(batch.sequences, result.tokens, strict=True)
    return [item.sequence for item, token in pairs if item.samples and token is None]


@dataclass(frozen=True)
class SequenceUpdate:
    """What one step changed for one sequence, as `postprocess` reports it."""

    sequence: Sequence
    token: SampledToken | None
    output_index: int
    """Absolute index of `token` among the outputs; meaningless when `token` is None."""
    finish_reason: FinishReason | None
    siblings: tuple[SampledToken, ...] = ()
    """With the first token: one for each of `Sequence.sibling_seeds`."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Where asked for: the next prompt tokens', in order over the steps, from the second on."""
