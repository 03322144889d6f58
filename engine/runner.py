"""Runs one step on the device: from a StepBatch to sampled tokens.

Owns no bookkeeping: what to compute and where it goes comes with the batch. Runs on the
device thread, one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from engine.attention import AttentionBackend
from engine.batch import Logprobs, SampledToken, ScheduledSequence, StepBatch, StepResult
from engine.decoder import Decoder, LayerHook
from engine.graphs import GraphDispatcher
from engine.kv_cache import KVCache
from engine.padded_steps import GraphSteps, StepOutput
from engine.prompt_logprobs import prompt_logprobs
from engine.sampler import sample, sample_siblings
from engine.sequence import Sequence
from engine.step_inputs import StepInputs


class RowSampler(Protocol):
    """Sampling on the device (engine.device_sampler), which a CPU has no use for."""

    def serves(self, sequence: Sequence) -> bool:
        """Whether it can choose the sequence's next token."""

    def write(self, sequences: list[Sequence], size: int) -> None:
        """Sets the parameters of the first `size` rows."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids by the parameters last written; negative where there is none."""


@dataclass(frozen=True)
class GraphPath:
    """Steps at fixed sizes, and which steps those are."""

    steps: GraphSteps
    dispatcher: GraphDispatcher


class ModelRunner:
    """A decoder, its KV cache and the attention between them.

    With `graphs`, steps of their sizes run there. With `sampler`, tokens are chosen on the
    device wherever a sequence's parameters allow it.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention: AttentionBackend,
        graphs: GraphPath | None = None,
        sampler: RowSampler | None = None,
    ) -> None:
        self.decoder = decoder
        self._cache = cache
        self._attention = attention
        self._graphs = graphs
        self._sampler = sampler
        self._block_size = cache.shape.block_size

    @torch.inference_mode()
    def execute(self, batch: StepBatch, after_layer: LayerHook | None = None) -> StepResult:
        """Computes the batch's tokens, fills their KV, samples where the batch says so.

        Decodes and prefill chunks run in one forward pass. `after_layer` is called on this
        thread each time one more layer's KV is complete in memory.
        A sequence whose logits are not finite gets no token.
        """
        # Single tokens first: they are attended together.
        order = sorted(
            range(len(batch.sequences)), key=lambda index: batch.sequences[index].num_tokens > 1
        )
        items = [batch.sequences[index] for index in order]
        self._cache.copy_blocks([pair for item in items for pair in self._copies(item)])
        if self._attention.reads_masked_keys:
            self._cache.zero_blocks([block for item in items for block in self._begun_blocks(item)])
        output = self._forward(items, after_layer)
        ends = accumulate(item.num_tokens for item in items)
        result = self._results(batch, output, dict(zip(order, ends, strict=True)))
        self._wait_for_device()
        return result

    def _results(self, batch: StepBatch, output: StepOutput, ends: dict[int, int]) -> StepResult:
        """What follows from a pass in which the i-th sequence's rows end at `ends[i]`."""
        hidden = output.hidden
        prompts = {
            index: self._prompt_logprobs(item, hidden[ends[index] - item.num_tokens : ends[index]])
            for index, item in enumerate(batch.sequences)
            if item.sequence.num_prompt_logprobs is not None
        }
        tokens: list[SampledToken | None] = [None] * len(batch.sequences)
        siblings: dict[int, tuple[SampledToken, ...]] = {}
        sampling = [index for index, item in enumerate(batch.sequences) if item.samples]
        if sampling:
            sequences = [batch.sequences[index].sequence for index in sampling]
            logits, sampled = self._sample(
                output, [ends[index] - 1 for index in sampling], sequences
            )
            for row, index in enumerate(sampling):
                token, sequence = sampled[row], sequences[row]
                tokens[index] = token
                if token is not None and sequence.sibling_seeds and not sequence.output_token_ids:
                    siblings[index] = sample_siblings(logits[row], sequence)
        return StepResult(tuple(tokens), siblings, prompts, output.graph)

    def _sample(
        self, output: StepOutput, rows: list[int], sequences: list[Sequence]
    ) -> tuple[torch.Tensor, list[SampledToken | None]]:
        """Logits and tokens of some rows of a pass, one for each sequence."""
        logits = output.logits
        if logits is None:
            logits = self.decoder.logits(output.hidden[rows])
        elif rows != list(range(len(logits))):
            logits = logits[rows]
        if self._sampler is None:
            return logits, sample(logits, sequences, self.decoder.largest)
        on_device = self._sampled_on_device(output, rows, logits, sequences)
        others = [row for row, token in enumerate(on_device) if token is None]
        if others:
            chosen = sample(logits[others], [sequences[row] for row in others])
            for row, token in zip(others, chosen, strict=True):
                on_device[row] = token
        return logits, on_device

    def _sampled_on_device(
        self,
        output: StepOutput,
        rows: list[int],
        logits: torch.Tensor,
        sequences: list[Sequence],
    ) -> list[SampledToken | None]:
        """None where the host has to choose, or find that there is nothing to choose."""
        assert self._sampler is not None
        is_served = [self._sampler.serves(sequence) for sequence in sequences]
        if not any(is_served):
            return [None] * len(sequences)
        if output.tokens is not None:
            every: list[int] = output.tokens.tolist()
            token_ids = [every[row] for row in rows]
        else:
            self._sampler.write(sequences, len(sequences))
            token_ids = self._sampler.sample(logits).tolist()
        return [
            SampledToken(token_id) if token_id >= 0 and serves else None
            for token_id, serves in zip(token_ids, is_served, strict=True)
        ]

    def _forward(self, items: list[ScheduledSequence], after_layer: LayerHook | None) -> StepOutput:
        """The items' tokens, in their order, in one pass."""
        inputs = StepInputs.of(items, self._block_size)
        hook = self._synchronized(after_layer)
        if self._graphs is not None:
            key = self._graphs.dispatcher.dispatch(
                inputs.num_tokens, inputs.is_decode_only, hook is not None
            )
            if key is not None:
                sequences = [item.sequence for item in items]
                return self._graphs.steps.run(key, inputs, sequences, hook)
        device = self.decoder.device
        hidden = self.decoder.forward(
            torch.tensor(inputs.input_ids, device=device),
            torch.tensor(inputs.positions, device=device),
            self._attention.prepare(inputs.chunks, inputs.slots),
            hook,
        )
        return StepOutput(hidden)

    def _synchronized(self, after_layer: LayerHook | None) -> LayerHook | None:
        """The hook, delayed on a GPU until what was launched has run."""
        if after_layer is None or self.decoder.device.type == "cpu":
            return after_layer
        hook = after_layer

        def wait_and_call(num_layers: int) -> None:
            self._wait_for_device()
            hook(num_layers)

        return wait_and_call

    def _wait_for_device(self) -> None:
        """Until the KV of what was launched stands in memory, where a transfer may read it, and
        inputs that were on their way have left the host."""
        if self.decoder.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _prompt_logprobs(
        self, item: ScheduledSequence, hidden: torch.Tensor
    ) -> tuple[Logprobs, ...]:
        """Of the prompt tokens that follow the item's; `hidden` is the item's own part."""
        sequence = item.sequence
        assert sequence.num_prompt_logprobs is not None
        next_ids = sequence.prompt_token_ids[item.start + 1 : item.start + item.num_tokens + 1]
        return prompt_logprobs(
            self.decoder, hidden[: len(next_ids)], next_ids, sequence.num_prompt_logprobs
        )

    def _copies(self, item: ScheduledSequence) -> list[tuple[int, int]]:
        """The copy of a shared block that the sequence is about to write to, if it needs one."""
        source = item.sequence.copy_source
        if source is None:
            return []
        return [(source, item.sequence.block_table[item.start // self._block_size])]

    def _begun_blocks(self, item: ScheduledSequence) -> list[int]:
        """The block that this step begins and leaves partly filled, if there is one."""
        end = item.start + item.num_tokens
        number, filled = divmod(end, self._block_size)
        if filled and number * self._block_size >= item.start:
            return [item.sequence.block_table[number]]
        return []
