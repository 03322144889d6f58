"""Paged attention with Triton kernels, for GPUs.

Leading chunks of one token go to the split-KV decode kernel, all others to the prefill kernel.
`prepare` copies a step's plan to the device in one piece; a graph instead keeps its plan in
buffers that last, and makes its `TritonStep` from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.attention.base import AttentionBackend, SequenceChunk, StepAttention
from engine.fp8 import quantize
from engine.kernels.decode_attention import DecodeRows, choose_num_splits, decode_attention
from engine.kernels.prefill_attention import (
    PrefillRows,
    cut_into_tiles,
    prefill_attention,
    tile_tokens,
)
from engine.kernels.tiles import AttentionShape
from engine.kv_cache import KVCache
from engine.step_inputs import on_device


@dataclass(frozen=True)
class TritonSettings:
    """What the kernels need to know beside the cache."""

    num_heads: int
    num_processors: int
    """Multiprocessors of the GPU: few rows are split until all have work."""


@dataclass(frozen=True)
class StepPlan:
    """Where everything of one step lies; int32 tensors on the device."""

    slots: torch.Tensor
    """int64 [T]: where each token's KV goes; -1 writes none."""
    decode: DecodeRows | None
    """The leading rows, of one token each."""
    prefill: PrefillRows | None
    """What follows."""


class TritonStep(StepAttention):
    """Attention by a plan, over whatever its tensors hold when the kernels run."""

    def __init__(self, cache: KVCache, settings: TritonSettings, plan: StepPlan) -> None:
        self._cache = cache
        self.plan = plan
        self._num_splits = 1
        if plan.decode is not None:
            self._num_splits = choose_num_splits(
                len(plan.decode.lengths), cache.shape.num_kv_heads, settings.num_processors
            )

    def layer_cache(self, layer: int) -> torch.Tensor:
        """Where the layer's keys and values go."""
        return self._cache.layer(layer)

    def layer_scales(self, layer: int) -> torch.Tensor | None:
        """Where their scales go, in fp8."""
        return self._cache.scales(layer) if self._cache.shape.is_fp8 else None

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See StepAttention. The decoder of this path writes KV itself: `attend_written`."""
        shape = self._cache.shape
        slots = self.plan.slots
        kept = slots >= 0
        blocks, offsets = slots[kept] // shape.block_size, slots[kept] % shape.block_size
        scales = self.layer_scales(layer)
        rows = key_value[kept]
        if scales is not None:
            rows, scales[blocks, :, :, offsets] = quantize(rows)
        self.layer_cache(layer)[blocks, :, :, offsets] = rows
        return self.attend_written(layer, query, window)

    def attend_written(self, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """Attention [T, num_heads * head_dim] of [T, num_heads, head_dim], KV being written."""
        decode, prefill = self.plan.decode, self.plan.prefill
        layer_cache, scales = self.layer_cache(layer), self.layer_scales(layer)
        if prefill is None:
            assert decode is not None
            return decode_attention(query, layer_cache, decode, window, self._num_splits, scales)
        output = query.new_zeros(len(query), query.shape[1] * query.shape[2])
        if decode is not None:
            num_rows = len(decode.lengths)
            output[:num_rows] = decode_attention(
                query[:num_rows], layer_cache, decode, window, self._num_splits, scales
            )
        prefill_attention(query, layer_cache, prefill, window, output, scales)
        return output


class TritonAttention(AttentionBackend):
    """Plans steps of any composition."""

    reads_masked_keys = False

    def __init__(self, cache: KVCache, settings: TritonSettings) -> None:
        self.cache = cache
        self.settings = settings
        shape = cache.shape
        self.tile_tokens = tile_tokens(
            AttentionShape(
                settings.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.block_size,
                shape.dtype,
                shape.is_fp8,
            )
        )

    def prepare(self, chunks: Sequence[SequenceChunk], slot_mapping: list[int]) -> TritonStep:
        num_single = 0
        while num_single < len(chunks) and chunks[num_single].num_tokens <= 1:
            num_single += 1
        device = self.cache.data.device
        slots = torch.tensor(slot_mapping, dtype=torch.int64)
        plan = StepPlan(
            slots=on_device(slots, device),
            decode=self._decode_rows(chunks[:num_single]),
            prefill=self._prefill_rows(chunks[num_single:], num_single),
        )
        return TritonStep(self.cache, self.settings, plan)

    def _decode_rows(self, chunks: Sequence[SequenceChunk]) -> DecodeRows | None:
        if not chunks:
            return None
        device = self.cache.data.device
        lengths = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32)
        return DecodeRows(on_device(table_of(chunks), device), on_device(lengths, device))

    def _prefill_rows(self, chunks: Sequence[SequenceChunk], first_row: int) -> PrefillRows | None:
        if not chunks:
            return None
        counts = [chunk.num_tokens for chunk in chunks]
        tiles = cut_into_tiles(counts, self.tile_tokens)
        numbers = (
            list(accumulate(counts, initial=first_row)),
            [chunk.start for chunk in chunks],
            [chunk for chunk, _ in tiles],
            [first for _, first in tiles],
        )
        device = self.cache.data.device
        first_rows, starts, tile_chunks, tile_firsts = (
            on_device(torch.tensor(each, dtype=torch.int32), device) for each in numbers
        )
        tables = on_device(table_of(chunks), device)
        return PrefillRows(tables, first_rows, starts, tile_chunks, tile_firsts)


def table_of(chunks: Sequence[SequenceChunk], num_columns: int | None = None) -> torch.Tensor:
    """The chunks' block tables as int32 [chunks, columns], filled up with block 0."""
    if num_columns is None:
        num_columns = max(1, max(len(chunk.block_table) for chunk in chunks))
    return torch.tensor(
        [chunk.block_table + [0] * (num_columns - len(chunk.block_table)) for chunk in chunks],
        dtype=torch.int32,
    )
