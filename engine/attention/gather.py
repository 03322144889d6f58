"""Paged attention with PyTorch's own kernels: gather the blocks, then one SDPA call.

Sequences with a single new token are attended together, padded to the longest; a longer
chunk is attended by itself. The query heads that share a KV head ride along as the query
length (single tokens) or as a head dimension of stride 0 (chunks), so keys and values are
never copied per query head.

Padding repeats the sequence's own first block and the unwritten end of a block is zero
(KVCache.zero_blocks): what the mask hides is finite, which SDPA relies on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionBackend, SequenceChunk, StepAttention
from engine.attention.fp8 import Fp8Rows, Fp8Writer
from engine.attention.writer import KVWriter
from engine.kv_cache import KVCache


class GatherAttention(AttentionBackend):
    """The way that runs on every device."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, chunks: Sequence[SequenceChunk], slot_mapping: list[int]) -> StepAttention:
        return _GatherStep(self._cache, chunks, slot_mapping)


class _GatherStep(StepAttention):
    """Runs of single-token chunks form one group each; every other chunk is its own."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[SequenceChunk], slot_mapping: list[int]
    ) -> None:
        writer = Fp8Writer if cache.shape.is_fp8 else KVWriter
        self._writer = writer(cache, slot_mapping)
        self._groups: list[tuple[slice, _SingleTokens | _Chunk]] = []
        first = 0
        singles: list[SequenceChunk] = []
        for chunk in chunks:
            if chunk.num_tokens == 1:
                singles.append(chunk)
                continue
            first = self._add_singles(cache, singles, first)
            singles = []
            self._groups.append((slice(first, first + chunk.num_tokens), _Chunk(cache, chunk)))
            first += chunk.num_tokens
        self._add_singles(cache, singles, first)

    def _add_singles(self, cache: KVCache, singles: list[SequenceChunk], first: int) -> int:
        end = first + len(singles)
        if singles:
            self._groups.append((slice(first, end), _SingleTokens(cache, singles)))
        return end

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        self._writer.write(layer, key_value)
        outputs = [
            group.attend(layer, query[rows], key_value[rows], window)
            for rows, group in self._groups
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _BlockRows:
    """Block tables as row numbers of the cache, a row being (block, layer, kv, head).

    The numbers are layer 0's; a later layer's lie a fixed distance on.
    """

    def __init__(self, cache: KVCache, block_tables: torch.Tensor) -> None:
        shape = cache.shape
        self._layer_rows = 2 * shape.num_kv_heads
        self._rows = cache.data.view(-1, shape.block_size * shape.head_dim)
        batch, num_blocks = block_tables.shape
        self._shape = (2, batch, shape.num_kv_heads, num_blocks * shape.block_size, shape.head_dim)
        rows = torch.arange(self._layer_rows, device=block_tables.device)
        rows = rows.view(2, 1, shape.num_kv_heads, 1)
        blocks = block_tables[None, :, None, :] * (shape.num_layers * self._layer_rows)
        self._index = (blocks + rows).flatten()

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, num_kv_heads, num_blocks * block_size, head_dim]."""
        rows = self._rows[layer * self._layer_rows :]
        keys, values = rows.index_select(0, self._index).view(self._shape)
        return keys, values


def _block_rows(cache: KVCache, block_tables: torch.Tensor) -> _BlockRows | Fp8Rows:
    rows = Fp8Rows if cache.shape.is_fp8 else _BlockRows
    return rows(cache, block_tables)


class _SingleTokens:
    """One new token each of several sequences."""

    def __init__(self, cache: KVCache, chunks: list[SequenceChunk]) -> None:
        block_size = cache.shape.block_size
        device = cache.data.device
        self._dtype = cache.shape.dtype
        self._num_kv_heads = cache.shape.num_kv_heads
        self._max_length = max(chunk.end for chunk in chunks)
        num_blocks = -(-self._max_length // block_size)
        tables = [_padded(chunk, num_blocks, block_size) for chunk in chunks]
        self._blocks = _block_rows(cache, torch.tensor(tables, device=device))
        self._lengths = torch.tensor([chunk.end for chunk in chunks], device=device)
        self._key_positions = torch.arange(num_blocks * block_size, device=device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, _: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        batch, num_heads, head_dim = query.shape
        keys, values = self._blocks.gather(layer)
        grouped = query.reshape(batch, self._num_kv_heads, -1, head_dim)
        output = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask(window))
        return output.reshape(batch, num_heads * head_dim)

    def _mask(self, window: int | None) -> torch.Tensor:
        """0 where a key is seen, -inf elsewhere: [batch, 1, 1, keys]."""
        if window is not None and window >= self._max_length:
            window = None
        mask = self._masks.get(window)
        if mask is None:
            is_hidden = self._key_positions >= self._lengths[:, None]
            if window is not None:
                is_hidden |= self._key_positions < self._lengths[:, None] - window
            mask = _additive(is_hidden, self._dtype)[:, None, None]
            self._masks[window] = mask
        return mask


class _Chunk:
    """Two or more tokens of one sequence."""

    def __init__(self, cache: KVCache, chunk: SequenceChunk) -> None:
        block_size = cache.shape.block_size
        device = cache.data.device
        self._chunk = chunk
        self._dtype = cache.shape.dtype
        self._num_kv_heads = cache.shape.num_kv_heads
        self._device = device
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._blocks: _BlockRows | Fp8Rows | None = None
        # In fp8 a token's own KV is read back, too: a chunk sees the same as one after it.
        if chunk.start > 0 or cache.shape.is_fp8:
            table = chunk.block_table[: -(-chunk.end // block_size)]
            self._blocks = _block_rows(cache, torch.tensor([table], device=device))

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        num_groups = num_heads // self._num_kv_heads
        if self._blocks is None:
            keys, values = key_value.permute(1, 2, 0, 3)[:, :, None]
        else:
            keys, values = self._blocks.gather(layer)
            keys = keys[0, :, None, : self._chunk.end]
            values = values[0, :, None, : self._chunk.end]
        grouped = query.view(num_tokens, self._num_kv_heads, num_groups, head_dim)
        mask = self._mask(window)
        output = scaled_dot_product_attention(
            grouped.permute(1, 2, 0, 3),
            keys.expand(-1, num_groups, -1, -1),
            values.expand(-1, num_groups, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads * head_dim)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """[num_tokens, end], or None where plain causality says it all."""
        chunk = self._chunk
        if window is not None and window >= chunk.end:
            window = None
        if window is None and chunk.start == 0:
            return None
        if window not in self._masks:
            queries = torch.arange(chunk.start, chunk.end, device=self._device)[:, None]
            keys = torch.arange(chunk.end, device=self._device)
            is_hidden = keys > queries
            if window is not None:
                is_hidden |= keys <= queries - window
            self._masks[window] = _additive(is_hidden, self._dtype)
        return self._masks[window]


def _padded(chunk: SequenceChunk, num_blocks: int, block_size: int) -> list[int]:
    """The chunk's blocks up to its end, then its first block again, `num_blocks` in all."""
    table = chunk.block_table[: -(-chunk.end // block_size)]
    return table + table[:1] * (num_blocks - len(table))


def _additive(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, float("-inf"))
