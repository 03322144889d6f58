"""The gathering backend's way to a cache in fp8: written and read as numbers of the model's dtype.

Slower than a plain cache on a CPU, which has no use for the memory saved but for tests.
"""

from __future__ import annotations

import torch

from engine.fp8 import dequantize, quantize
from engine.kv_cache import KVCache


class Fp8Writer:
    """See engine.attention.writer.KVWriter."""

    def __init__(self, cache: KVCache, slot_mapping: list[int]) -> None:
        self._cache = cache
        slots = torch.tensor(slot_mapping, dtype=torch.int64, device=cache.data.device)
        self._kept = torch.nonzero(slots >= 0).flatten()
        kept = slots[self._kept]
        self._blocks = torch.div(kept, cache.shape.block_size, rounding_mode="floor")
        self._offsets = kept % cache.shape.block_size

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """`key_value`: [T, 2, num_kv_heads, head_dim]."""
        bits, scales = quantize(key_value.index_select(0, self._kept))
        self._cache.layer(layer)[self._blocks, :, :, self._offsets] = bits
        self._cache.scales(layer)[self._blocks, :, :, self._offsets] = scales


class Fp8Rows:
    """Keys and values of whole block tables, int64 [batch, num_blocks]."""

    def __init__(self, cache: KVCache, block_tables: torch.Tensor) -> None:
        self._cache = cache
        self._index = block_tables.flatten()
        self._sizes = tuple(block_tables.shape)

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, num_kv_heads, num_blocks * block_size, head_dim]."""
        shape = self._cache.shape
        rows = dequantize(
            self._cache.layer(layer).index_select(0, self._index),
            self._cache.scales(layer).index_select(0, self._index),
            shape.dtype,
        )
        batch, num_blocks = self._sizes
        blocks = rows.view(
            batch, num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim
        )
        keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        return keys, values
