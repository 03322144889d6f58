"""The specification of paged attention: one sequence after the other, every step spelled out.

Attention: Vaswani et al. (arXiv 1706.03762), section 3.2.1; shared KV heads: Ainslie et al.
(arXiv 2305.13245); sliding window: Beltagy et al. (arXiv 2004.05150), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import AttentionBackend, SequenceChunk, StepAttention
from engine.kv_cache import KVCache


class ReferenceAttention(AttentionBackend):
    """Slow, exact in its order of rounding: scores and softmax in float32 (or float64)."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, chunks: Sequence[SequenceChunk], slot_mapping: list[int]) -> StepAttention:
        return _ReferenceStep(self._cache, tuple(chunks), slot_mapping)


class _ReferenceStep(StepAttention):
    def __init__(
        self, cache: KVCache, chunks: tuple[SequenceChunk, ...], slot_mapping: list[int]
    ) -> None:
        self._cache = cache
        self._chunks = chunks
        self._slot_mapping = slot_mapping

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        block_size = self._cache.shape.block_size
        blocks = self._cache.layer(layer)
        for token, slot in enumerate(self._slot_mapping):
            if slot >= 0:
                blocks[slot // block_size, :, :, slot % block_size] = key_value[token]
        outputs = []
        first = 0
        for chunk in self._chunks:
            keys, values = _gather(blocks, chunk)
            rows = query[first : first + chunk.num_tokens]
            outputs.append(_attend_one(rows, keys, values, chunk, window))
            first += chunk.num_tokens
        return torch.cat(outputs)


def _gather(blocks: torch.Tensor, chunk: SequenceChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_kv_heads, end, head_dim] of the chunk's sequence up to its end."""
    parts = [blocks[block] for block in chunk.block_table]
    keys, values = torch.cat(parts, dim=2)[:, :, : chunk.end]
    return keys, values


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: SequenceChunk,
    window: int | None,
) -> torch.Tensor:
    precise = torch.promote_types(query.dtype, torch.float32)
    num_groups = query.shape[1] // keys.shape[0]
    keys = keys.repeat_interleave(num_groups, dim=0).to(precise)
    values = values.repeat_interleave(num_groups, dim=0).to(precise)
    scores = query.transpose(0, 1).to(precise) @ keys.transpose(1, 2)
    scores = scores * query.shape[-1] ** -0.5
    query_positions = torch.arange(chunk.start, chunk.end)[:, None]
    key_positions = torch.arange(chunk.end)[None]
    is_hidden = key_positions > query_positions
    if window is not None:
        is_hidden = is_hidden | (key_positions <= query_positions - window)
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    output: torch.Tensor = weights @ values
    return output.transpose(0, 1).flatten(1).to(query.dtype)
