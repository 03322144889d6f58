"""Writes a step's keys and values into their slots."""

from __future__ import annotations

import torch

from engine.kv_cache import KVCache


class KVWriter:
    """The slots of one step, resolved once and used by every layer.

    Takes the cache as rows of `head_dim` numbers: a token's row of (layer, kv, head) is
    `(((block * num_layers + layer) * 2 + kv) * num_kv_heads + head) * block_size + offset`.
    """

    def __init__(self, cache: KVCache, slot_mapping: list[int]) -> None:
        shape = cache.shape
        device = cache.data.device
        slots = torch.tensor(slot_mapping, dtype=torch.int64, device=device)
        self._kept: torch.Tensor | None = None
        if slot_mapping and min(slot_mapping) < 0:
            self._kept = torch.nonzero(slots >= 0).flatten()
            slots = slots[self._kept]
        self._rows = cache.data.view(-1, shape.head_dim)
        self._layer_rows = 2 * shape.num_kv_heads * shape.block_size
        blocks = torch.div(slots, shape.block_size, rounding_mode="floor")
        first = blocks * (shape.num_layers * self._layer_rows) + slots % shape.block_size
        heads = torch.arange(2 * shape.num_kv_heads, device=device) * shape.block_size
        self._index = (first[:, None] + heads).flatten()

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """`key_value`: [T, 2, num_kv_heads, head_dim]."""
        if self._kept is not None:
            key_value = key_value.index_select(0, self._kept)
        rows = self._rows[layer * self._layer_rows :]
        rows.index_copy_(0, self._index, key_value.reshape(-1, rows.shape[1]))
