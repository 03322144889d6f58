"""From a forward pass to the step's result: who chooses the tokens, the host or the device.

The host's sampler can do everything. A device's chooses most tokens by itself, so that the next
step can begin before the host knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import Logprobs, SampledToken, ScheduledSequence, StepBatch, StepResult
from engine.decoder import Decoder
from engine.padded_steps import StepOutput
from engine.prompt_logprobs import prompt_logprobs
from engine.sampler import sample, sample_siblings
from engine.step_inputs import on_device


class RowSampler(Protocol):
    """Sampling on the device (engine.device_sampler), which a CPU has no use for."""

    def serves(self, item: ScheduledSequence) -> bool:
        """Whether it can choose the token that follows the item."""

    def write(self, items: list[ScheduledSequence], size: int) -> None:
        """Sets the parameters of the first `size` rows."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids int32 by the parameters last written; negative where there is none."""


@dataclass(frozen=True)
class Pass:
    """A forward pass of one batch."""

    batch: StepBatch
    output: StepOutput
    ends: dict[int, int]
    """By index in the batch: behind which row of `output` the sequence's rows end."""

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """Those that sample, in the batch's order."""
        return [item for item in self.batch.sequences if item.samples]

    @property
    def sampling_rows(self) -> list[int]:
        """Their newest tokens' rows."""
        items = enumerate(self.batch.sequences)
        return [self.ends[index] - 1 for index, item in items if item.samples]


class StepResults:
    """Makes results of passes. `sampler`: of the device, where it has one."""

    def __init__(self, decoder: Decoder, sampler: RowSampler | None) -> None:
        self._decoder = decoder
        self._sampler = sampler

    def may_be_late(self, batch: StepBatch) -> bool:
        """Whether the step yields only tokens, and the device chooses all of them."""
        sampler = self._sampler
        return sampler is not None and not any(
            _has_siblings(item)
            or item.sequence.num_prompt_logprobs is not None
            or (item.samples and not sampler.serves(item))
            for item in batch.sequences
        )

    def late(self, done: Pass) -> torch.Tensor:
        """int32 [sequences that sample]: tokens that stay on the device; negative for none."""
        items = done.sampling
        if not items:
            return torch.empty(0, dtype=torch.int32, device=self._decoder.device)
        if done.output.tokens is not None:
            return _rows_of(done.output.tokens, done.sampling_rows)
        return self._sampled(self._logits(done), items)

    def complete(self, done: Pass) -> StepResult:
        """The result with the host's part in it."""
        batch, hidden = done.batch, done.output.hidden
        prompts = {
            index: self._prompt_logprobs(
                item, hidden[done.ends[index] - item.num_tokens : done.ends[index]]
            )
            for index, item in enumerate(batch.sequences)
            if item.sequence.num_prompt_logprobs is not None
        }
        items = done.sampling
        if not items:
            nothing = (None,) * len(batch.sequences)
            return StepResult(nothing, {}, prompts, done.output.graph)
        logits = self._logits(done)
        tokens = self._chosen_on_device(done, logits)
        others = [row for row, token in enumerate(tokens) if token is None]
        if others:
            chosen = sample(
                _rows_of(logits, others), [items[row] for row in others], self._decoder.largest
            )
            for row, token in zip(others, chosen, strict=True):
                tokens[row] = token
        indices = [index for index, item in enumerate(batch.sequences) if item.samples]
        siblings = {
            indices[row]: sample_siblings(logits[row], item)
            for row, item in enumerate(items)
            if tokens[row] is not None and _has_siblings(item)
        }
        by_index = dict(zip(indices, tokens, strict=True))
        following = tuple(by_index.get(index) for index in range(len(batch.sequences)))
        return StepResult(following, siblings, prompts, done.output.graph)

    def _logits(self, done: Pass) -> torch.Tensor:
        """[sequences that sample, vocab_size]."""
        if done.output.logits is not None:
            return _rows_of(done.output.logits, done.sampling_rows)
        return self._decoder.logits(_rows_of(done.output.hidden, done.sampling_rows))

    def _sampled(self, logits: torch.Tensor, items: list[ScheduledSequence]) -> torch.Tensor:
        assert self._sampler is not None
        self._sampler.write(items, len(items))
        return self._sampler.sample(logits)

    def _chosen_on_device(self, done: Pass, logits: torch.Tensor) -> list[SampledToken | None]:
        """None where the host has to choose, or find that there is nothing to choose."""
        items = done.sampling
        is_served = [self._sampler is not None and self._sampler.serves(item) for item in items]
        if not any(is_served):
            return [None] * len(items)
        if done.output.tokens is not None:
            token_ids = _rows_of(done.output.tokens, done.sampling_rows)
        else:
            token_ids = self._sampled(logits, items)
        return [
            SampledToken(token_id) if token_id >= 0 and serves else None
            for token_id, serves in zip(token_ids.tolist(), is_served, strict=True)
        ]

    def _prompt_logprobs(
        self, item: ScheduledSequence, hidden: torch.Tensor
    ) -> tuple[Logprobs, ...]:
        """Of the prompt tokens that follow the item's; `hidden` is the item's own part."""
        sequence = item.sequence
        assert sequence.num_prompt_logprobs is not None
        next_ids = sequence.prompt_token_ids[item.start + 1 : item.start + item.num_tokens + 1]
        return prompt_logprobs(
            self._decoder, hidden[: len(next_ids)], next_ids, sequence.num_prompt_logprobs
        )


class PendingTokens:
    """A step's tokens on their way to the host."""

    def __init__(self, done: Pass, token_ids: torch.Tensor) -> None:
        """`token_ids`: int32 [sequences of the batch that sample], on the device."""
        self._batch = done.batch
        self._graph = done.output.graph
        self._event: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._token_ids = torch.empty(len(token_ids), dtype=torch.int32, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            # The next step may overwrite them.
            self._token_ids = token_ids.clone()

    def wait(self) -> StepResult:
        """See PendingResult: then the step's KV stands in memory, too."""
        if self._event is not None:
            self._event.synchronize()
        numbers = iter(self._token_ids.tolist())
        following = [next(numbers) if item.samples else -1 for item in self._batch.sequences]
        tokens = tuple(SampledToken(n) if n >= 0 else None for n in following)
        return StepResult(tokens, graph=self._graph)


def _has_siblings(item: ScheduledSequence) -> bool:
    """Whether tokens for other choices are drawn from the item's logits."""
    return item.samples and item.output_index == 0 and bool(item.sequence.sibling_seeds)


def _rows_of(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of `x`: a view where they are all of its first ones."""
    if rows == list(range(len(rows))):
        return x[: len(rows)]
    return x.index_select(0, on_device(torch.tensor(rows), x.device))
