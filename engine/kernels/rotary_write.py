"""From a step's fused projection to rotated queries and the KV cache, in one pass.

Norms of query and key heads (where the model has them), rotation of both (Su et al., RoFormer,
arXiv 2104.09864, the pair split over the two halves of a head), and keys and values to their
slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.tiles import E4M3_LARGEST, E4M3_LEAST, to_e4m3

_TILE_HEADS = 8


@dataclass(frozen=True)
class HeadNorms:
    """Weights [head_dim] of the norms of query and key heads."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


@dataclass(frozen=True)
class RotaryRows:
    """Of each of a step's tokens: the angles, and the slot of its KV."""

    cos: torch.Tensor
    """float32 [T, head_dim / 2]."""
    sin: torch.Tensor
    slots: torch.Tensor
    """int64 [T]; -1 writes no KV."""


@triton.jit
def rotary_write_kernel(
    qkv_ptr,
    cache_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    query_norm_ptr,
    key_norm_ptr,
    epsilon,
    block_stride,
    scale_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    """Some heads of one token: queries, then keys, then values. Grid: tokens, tiles of heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    NUM_ALL: tl.constexpr = NUM_ROTATED + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    pairs = tl.arange(0, TILE_HALF)
    is_pair = pairs < HALF
    is_real = (heads < NUM_ALL)[:, None] & is_pair[None]
    low_ptr = qkv_ptr + (token * NUM_ALL + heads)[:, None] * HEAD_DIM + pairs[None]
    low = tl.load(low_ptr, mask=is_real, other=0.0).to(tl.float32)
    high = tl.load(low_ptr + HALF, mask=is_real, other=0.0).to(tl.float32)
    is_query, is_rotated = (heads < NUM_HEADS)[:, None], (heads < NUM_ROTATED)[:, None]
    new_low, new_high = low, high
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + epsilon)[:, None]
        low_weight = tl.where(
            is_query,
            tl.load(query_norm_ptr + pairs, mask=is_pair, other=0.0)[None],
            tl.load(key_norm_ptr + pairs, mask=is_pair, other=0.0)[None],
        ).to(tl.float32)
        high_weight = tl.where(
            is_query,
            tl.load(query_norm_ptr + HALF + pairs, mask=is_pair, other=0.0)[None],
            tl.load(key_norm_ptr + HALF + pairs, mask=is_pair, other=0.0)[None],
        ).to(tl.float32)
        new_low, new_high = low * scale * low_weight, high * scale * high_weight
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0)[None]
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0)[None]
    rotated_low = new_low * cos - new_high * sin
    rotated_high = new_high * cos + new_low * sin
    low = tl.where(is_rotated, rotated_low, low)
    high = tl.where(is_rotated, rotated_high, high)
    tl.store(low_ptr, low, mask=is_real & is_query)
    tl.store(low_ptr + HALF, high, mask=is_real & is_query)
    slot = tl.load(slot_ptr + token)
    # Keys, then values, lie one (head, token) row after the other in a block.
    rows = (heads - NUM_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    block = (slot // BLOCK_SIZE) * block_stride
    written_ptr = cache_ptr + block + rows[:, None] * HEAD_DIM + pairs[None]
    is_written = is_real & (heads >= NUM_HEADS)[:, None] & (slot >= 0)
    if IS_FP8:
        sizes = tl.maximum(tl.abs(low), tl.abs(high))
        # Also false of what is not a number.
        is_finite = tl.min((sizes <= 3.4028234e38).to(tl.int32), 1) > 0
        low = tl.where(is_finite[:, None], low, 0.0)
        high = tl.where(is_finite[:, None], high, 0.0)
        largest = tl.where(is_finite, tl.max(sizes, 1), float("nan"))
        is_some = largest > E4M3_LEAST
        inverse = tl.where(is_some, E4M3_LARGEST / tl.where(is_some, largest, 1.0), 0.0)
        inverse = inverse[:, None]
        low, high = to_e4m3(low * inverse), to_e4m3(high * inverse)
        scales_ptr = scale_ptr + (slot // BLOCK_SIZE) * scale_stride + rows
        is_scale = (heads >= NUM_HEADS) & (heads < NUM_ALL) & (slot >= 0)
        tl.store(scales_ptr, largest / E4M3_LARGEST, mask=is_scale)
    tl.store(written_ptr, low, mask=is_written)
    tl.store(written_ptr + HALF, high, mask=is_written)


def rotate_and_write(
    qkv: torch.Tensor,
    layer_cache: torch.Tensor,
    rows: RotaryRows,
    norms: HeadNorms | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the queries in place, writes keys and values; returns the queries.

    `qkv`: contiguous [T, (num_heads + 2 * num_kv_heads) * head_dim]; `layer_cache`:
    [blocks, 2, num_kv_heads, block_size, head_dim], blocks any stride apart. With `scales`,
    float32 [blocks, 2, num_kv_heads, block_size], e4m3 numbers are written there.
    Returns a view [T, num_heads, head_dim] of `qkv`.
    """
    _, _, num_kv_heads, block_size, head_dim = layer_cache.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    num_all = heads.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    rotary_write_kernel[(len(qkv), triton.cdiv(num_all, _TILE_HEADS))](
        qkv,
        layer_cache,
        layer_cache if scales is None else scales,
        rows.cos,
        rows.sin,
        rows.slots,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        layer_cache.stride(0),
        0 if scales is None else scales.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_NORMS=norms is not None,
        IS_FP8=scales is not None,
        TILE_HEADS=_TILE_HEADS,
        TILE_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2 if scales is None else 4,
    )
    return heads[:, :num_heads]
