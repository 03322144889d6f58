"""What attention kernels share: sizes of tiles, rows of the paged cache, the online softmax.

Online softmax: Milakov and Gimelshein (arXiv 1805.02867); in tiles: Dao et al.,
FlashAttention (arXiv 2205.14135), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_DOT = 16
"""Least extent of a tile that a tensor core multiplies."""
_TILE_BYTES = 16384
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionShape:
    """What a compiled attention kernel is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_dim(self) -> int:
        return max(MIN_DOT, int(triton.next_power_of_2(self.head_dim)))

    @property
    def tile_keys(self) -> int:
        """Keys in a tile: 16 KiB of them, so that tiles in flight fit the shared memory.

        Products of float32 are made of three of tf32, which takes registers: small tiles.
        """
        keys = _TILE_BYTES // (self.tile_dim * self.dtype.itemsize)
        most = 64 if self.dtype.itemsize == 2 else MIN_DOT
        return min(most, max(MIN_DOT, keys))

    @property
    def num_warps(self) -> int:
        """More where the products of float32 and a long row would not fit the registers."""
        return 8 if self.dtype.itemsize > 2 and self.tile_dim > 128 else 4

    @property
    def num_stages(self) -> int:
        return 3 if self.dtype.itemsize == 2 else 2

    @property
    def scale_log2(self) -> float:
        """Turns a dot product into a score whose power of two is wanted."""
        return float(self.head_dim**-0.5 * _LOG2_E)


@triton.jit
def key_rows(
    table_ptr, positions, is_read, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Element offsets (int64) of the positions' rows within a (layer, kv, head) of the cache."""
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=is_read, other=0)
    return blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def softmax_step(scores, values, weighted, maxima, sums):
    """Takes one tile of keys into the running softmax, all in powers of two.

    `scores` [rows, keys] are -inf where a key is not seen; a row may have seen none so far.
    """
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    finite = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)
    weights = tl.exp2(scores - finite[:, None])
    rescale = tl.exp2(maxima - finite)
    sums = sums * rescale + tl.sum(weights, 1)
    weighted = weighted * rescale[:, None]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="tf32x3")
    return weighted, new_maxima, sums
