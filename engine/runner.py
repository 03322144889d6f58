"""Runs one step on the device: from a StepBatch to sampled tokens.

Owns no bookkeeping: what to compute and where it goes comes with the batch. Runs on the
device thread, one step at a time.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.attention import AttentionBackend, SequenceChunk
from engine.batch import Logprobs, SampledToken, ScheduledSequence, StepBatch, StepResult
from engine.decoder import Decoder, LayerHook
from engine.kv_cache import KVCache
from engine.prompt_logprobs import prompt_logprobs
from engine.sampler import sample, sample_siblings


class ModelRunner:
    """A decoder, its KV cache and the attention between them."""

    def __init__(self, decoder: Decoder, cache: KVCache, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._cache = cache
        self._attention = attention
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
        self._cache.zero_blocks([block for item in items for block in self._begun_blocks(item)])
        hidden = self._forward(items, after_layer)
        ends = accumulate(item.num_tokens for item in items)
        return self._results(batch, hidden, dict(zip(order, ends, strict=True)))

    def _results(self, batch: StepBatch, hidden: torch.Tensor, ends: dict[int, int]) -> StepResult:
        """What follows from hidden states, of which the i-th sequence's end at row `ends[i]`."""
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
            logits = self._decoder.logits(hidden[[ends[index] - 1 for index in sampling]])
            sampled = sample(logits, sequences)
            for index, sequence, token, row in zip(
                sampling, sequences, sampled, logits, strict=True
            ):
                tokens[index] = token
                if token is not None and sequence.sibling_seeds and not sequence.output_token_ids:
                    siblings[index] = sample_siblings(row, sequence)
        return StepResult(tuple(tokens), siblings, prompts)

    def _forward(
        self, items: list[ScheduledSequence], after_layer: LayerHook | None
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden_size] of the items' tokens, in their order."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        chunks: list[SequenceChunk] = []
        for item in items:
            end = item.start + item.num_tokens
            block_table = item.sequence.block_table
            input_ids += item.sequence.token_slice(item.start, end)
            positions += range(item.start, end)
            slots += self._slots(block_table, item.start, end)
            chunks.append(SequenceChunk(item.start, item.num_tokens, block_table))
        device = self._decoder.device
        return self._decoder.forward(
            torch.tensor(input_ids, device=device),
            torch.tensor(positions, device=device),
            self._attention.prepare(chunks, slots),
            self._synchronized(after_layer),
        )

    def _synchronized(self, after_layer: LayerHook | None) -> LayerHook | None:
        """The hook, delayed on a GPU until what was launched has run."""
        if after_layer is None or self._decoder.device.type == "cpu":
            return after_layer
        hook = after_layer

        def wait_and_call(num_layers: int) -> None:
            torch.cuda.current_stream().synchronize()
            hook(num_layers)

        return wait_and_call

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

    def _slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        size = self._block_size
        return [block_table[p // size] * size + p % size for p in range(start, end)]

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
