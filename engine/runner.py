"""Runs one step on the device: from a StepBatch to sampled tokens.

Owns no bookkeeping: what to compute and where it goes comes with the batch. Runs on the
device thread, one step at a time.
"""

from __future__ import annotations

import torch

from engine.attention import AttentionBackend, SequenceChunk
from engine.batch import SampledToken, ScheduledSequence, StepBatch, StepResult
from engine.decoder import Decoder, LayerHook
from engine.kv_cache import KVCache
from engine.sampler import sample


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
        self._cache.zero_blocks([block for item in items for block in self._begun_blocks(item)])
        hidden = self._forward(items, after_layer)
        last_rows: list[int] = []
        sampling: list[int] = []
        end = 0
        for index, item in zip(order, items, strict=True):
            end += item.num_tokens
            if item.samples:
                last_rows.append(end - 1)
                sampling.append(index)
        tokens: list[SampledToken | None] = [None] * len(items)
        if sampling:
            logits = self._decoder.logits(hidden[last_rows])
            sampled = sample(logits, [batch.sequences[index].sequence for index in sampling])
            for index, token in zip(sampling, sampled, strict=True):
                tokens[index] = token
        return StepResult(tuple(tokens))

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

    def _slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        size = self._block_size
        return [block_table[p // size] * size + p % size for p in range(start, end)]

    def _begun_blocks(self, item: ScheduledSequence) -> list[int]:
        """The block that this step begins and leaves partly filled, if there is one."""
        end = item.start + item.num_tokens
        number, filled = divmod(end, self._block_size)
        if filled and number * self._block_size >= item.start:
            return [item.sequence.block_table[number]]
        return []
