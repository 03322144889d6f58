"""What attention kernels share: sizes of tiles, a tile's scores and values out of the paged
cache, the online softmax.

Online softmax: Milakov and Gimelshein (arXiv 1805.02867); in tiles: Dao et al.,
FlashAttention (arXiv 2205.14135), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

E4M3_SCALE = tl.constexpr(256.0)
E4M3_LARGEST = tl.constexpr(448.0)
E4M3_LEAST = tl.constexpr(1e-30)
"""engine.fp8.LEAST"""
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
    """Of what is computed with."""
    is_fp8: bool = False
    """Whether the cache holds e4m3 numbers, which take registers to be converted."""

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
def from_e4m3(bits):
    """float16 numbers of which `E4M3_SCALE` times are those of the bits, exactly.

    In float16 the same bits stand for 2**-8 of the number, also below the normal ones; so no
    architecture needs instructions for fp8. Not-a-number is told by the scale.
    """
    wide = bits.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """Bits uint8 of float32 numbers up to 448, rounded to the nearest, to even at a tie."""
    bits = numbers.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of the mantissa stay, and the exponent counts from -7 instead of -127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # From 2**14 on float32 has a unit of 2**-9, the smallest number of e4m3.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    tiny = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    rounded = tl.where(magnitude < 0x3C800000, tiny, tl.minimum(normal, 0x7E))
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def score_tile(
    query,
    key_ptr,
    scale_ptr,
    kv_head,
    table_ptr,
    positions,
    is_read,
    scale_log2,
    block_stride,
    scale_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Scores [rows, keys] of one tile of keys, as powers of two, and their values [keys, dims].

    `key_ptr`: the keys of `kv_head` in the first block; `scale_ptr`: the scales of all KV heads
    there, of no use without IS_FP8. A key that is not read is all zeros, and so is its score.
    """
    dims = tl.arange(0, TILE_DIM)
    rows = key_rows(table_ptr, positions, is_read, block_stride, BLOCK_SIZE, HEAD_DIM)
    offsets = rows[:, None] + dims[None]
    mask = is_read[:, None] & (dims < HEAD_DIM)[None]
    keys = tl.load(key_ptr + offsets, mask=mask, other=0)
    values = tl.load(key_ptr + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + offsets, mask=mask, other=0)
    if IS_FP8:
        rows = key_rows(table_ptr, positions, is_read, scale_stride, BLOCK_SIZE, 1)
        rows += kv_head * BLOCK_SIZE
        key_scales = tl.load(scale_ptr + rows, mask=is_read, other=0.0) * E4M3_SCALE
        rows += NUM_KV_HEADS * BLOCK_SIZE
        value_scales = tl.load(scale_ptr + rows, mask=is_read, other=0.0) * E4M3_SCALE
        keys = from_e4m3(keys).to(query.dtype)
        values = (from_e4m3(values).to(tl.float32) * value_scales[:, None]).to(query.dtype)
    scores = tl.dot(query, keys.T, input_precision="tf32x3") * scale_log2
    if IS_FP8:
        scores *= key_scales[None]
    return scores, values


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
