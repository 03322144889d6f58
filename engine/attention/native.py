"""Paged attention by the compiled kernels of `engine.native`: CPUs, float32 and bfloat16.

One call a layer writes the step's keys and values and attends over whatever the step holds,
decodes and chunks of prompts alike, straight from the cache's blocks.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

import torch

from engine.attention.base import AttentionBackend, SequenceChunk, StepAttention
from engine.kv_cache import BlockShape, KVCache
from engine.native.library import DTYPES, NO_WINDOW, CacheShape, Layer, Library, Step

_LANES = 16


class NativeAttention(AttentionBackend):
    """Needs a cache that `unsupported` has nothing against."""

    def __init__(self, cache: KVCache, library: Library) -> None:
        self._cache = cache
        self._library = library

    def prepare(self, chunks: Sequence[SequenceChunk], slot_mapping: list[int]) -> StepAttention:
        return NativeStep(self._cache, self._library, chunks, slot_mapping)


def unsupported(library: Library, shape: BlockShape, num_heads: int) -> str | None:
    """Why the kernels cannot serve this cache, or None."""
    num_groups = num_heads // shape.num_kv_heads
    if shape.is_fp8:
        return "a KV cache in fp8"
    if shape.dtype not in DTYPES:
        return f"dtype {shape.dtype}"
    if shape.head_dim % _LANES or shape.head_dim > library.max_head_dim:
        return f"head_dim {shape.head_dim}"
    if num_groups > library.max_num_groups:
        return f"{num_groups} query heads for one KV head"
    return None


class NativeStep(StepAttention):
    """One step's attention. Owns the arrays that the kernels read."""

    def __init__(
        self,
        cache: KVCache,
        library: Library,
        chunks: Sequence[SequenceChunk],
        slot_mapping: list[int],
    ) -> None:
        shape = cache.shape
        self._library = library
        self._described = array("q", _described(chunks, shape.block_size))
        tables = (chunk.block_table[: -(-chunk.end // shape.block_size)] for chunk in chunks)
        self._block_tables = array("q", chain.from_iterable(tables))
        self._slots = array("q", slot_mapping)
        self._cache = cache
        self._step = Step(
            cache=cache.data_ptr(),
            shape=CacheShape(
                shape.num_layers, shape.num_kv_heads, shape.block_size, shape.head_dim
            ),
            num_rows=len(slot_mapping),
            num_chunks=len(chunks),
            chunks=self._described.buffer_info()[0],
            block_tables=self._block_tables.buffer_info()[0],
            slots=self._slots.buffer_info()[0],
            num_threads=torch.get_num_threads(),
        )
        self._layer = Layer()
        self.address = ctypes.addressof(self._step)
        """Of the `Step`, which lives as long as this does."""
        self._layer_address = ctypes.addressof(self._layer)

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return int(self._step.num_rows)

    def set_num_heads(self, num_heads: int) -> None:
        """The model's query heads, which the cache does not know."""
        self._step.num_groups = num_heads // self._cache.shape.num_kv_heads

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        query, key_value = _with_dense_rows(query), _with_dense_rows(key_value)
        output = query.new_empty((num_tokens, num_heads * head_dim))
        self.set_num_heads(num_heads)
        call = self._layer
        call.index = layer
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.key_value, call.key_value_stride = key_value.data_ptr(), key_value.stride(0)
        call.output = output.data_ptr()
        call.window = NO_WINDOW if window is None else window
        self._library.attend(self.address, self._layer_address)
        return output


def _described(chunks: Sequence[SequenceChunk], block_size: int) -> list[int]:
    """The fields of `Chunk` of step.h, one chunk after the other."""
    fields: list[int] = []
    first_row = first_block = 0
    for chunk in chunks:
        fields += (chunk.start, chunk.num_tokens, first_row, first_block)
        first_row += chunk.num_tokens
        first_block += -(-chunk.end // block_size)
    return fields


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where all of a token's numbers lie side by side."""
    return x if x[0].is_contiguous() else x.contiguous()
