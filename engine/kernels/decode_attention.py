"""Paged attention of steps with one new token a sequence.

A program attends a slice of one sequence's keys with all the query heads of one KV head, so
that keys and values are read once. With few sequences the keys of each are split among several
programs, whose results a second kernel combines (Dao et al., Flash-Decoding, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.tiles import MIN_DOT, AttentionShape, score_tile, softmax_step

_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True)
class DecodeRows:
    """Where the keys of each row's sequence lie. int32, on the device."""

    block_tables: torch.Tensor
    """[rows, blocks]; entries past a row's length are not read."""
    lengths: torch.Tensor
    """[rows]: tokens that the row sees without a window, its own included; 0 pads."""


@triton.jit
def _slice_size(num_keys, num_splits, TILE_KEYS: tl.constexpr):
    """Keys that one of the splits attends: whole tiles."""
    return tl.cdiv(num_keys, num_splits * TILE_KEYS) * TILE_KEYS


@triton.jit
def decode_kernel(
    output_ptr,
    log_sum_ptr,
    query_ptr,
    cache_ptr,
    scale_ptr,
    table_ptr,
    length_ptr,
    scale_log2,
    query_stride,
    block_stride,
    scale_stride,
    table_stride,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """One slice of one (row, KV head). Grid: rows, KV heads, splits.

    Writes [rows, heads, splits, head_dim], and with IS_SPLIT the base-2 logarithms of the sums
    of weights [rows, heads, splits]; nothing for a slice without keys, unless it is the only.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    size = _slice_size(length - first, num_splits, TILE_KEYS)
    begin = first + split * size
    end = tl.minimum(begin + size, length)
    if IS_SPLIT and begin >= end:
        return
    heads, dims, keys = tl.arange(0, TILE_GROUP), tl.arange(0, TILE_DIM), tl.arange(0, TILE_KEYS)
    is_real = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None]
    head_rows = kv_head * GROUP + heads
    query = tl.load(
        query_ptr + row.to(tl.int64) * query_stride + head_rows[:, None] * HEAD_DIM + dims[None],
        mask=is_real,
        other=0.0,
    )
    key_ptr = cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    row_table_ptr = table_ptr + row.to(tl.int64) * table_stride
    weighted = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    maxima = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_GROUP], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        positions = start + keys
        is_read = positions < end
        scores, values = score_tile(
            query,
            key_ptr,
            scale_ptr,
            kv_head,
            row_table_ptr,
            positions,
            is_read,
            scale_log2,
            block_stride,
            scale_stride,
            NUM_KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE_DIM,
            IS_FP8,
        )
        scores = tl.where(is_read[None], scores, float("-inf"))
        weighted, maxima, sums = softmax_step(scores, values, weighted, maxima, sums)
    results = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head_rows
    results = results * num_splits + split
    output = weighted / tl.where(sums == 0.0, 1.0, sums)[:, None]
    tl.store(output_ptr + results[:, None] * HEAD_DIM + dims[None], output, mask=is_real)
    if IS_SPLIT:
        tl.store(log_sum_ptr + results, maxima + tl.log2(sums), mask=heads < GROUP)


@triton.jit
def combine_kernel(
    output_ptr,
    partial_ptr,
    log_sum_ptr,
    length_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Combines the slices of one (row, head). Grid: rows, heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    result = row.to(tl.int64) * tl.num_programs(1) + head
    num_keys = tl.load(length_ptr + row)
    if WINDOW:
        num_keys = tl.minimum(num_keys, WINDOW)
    splits, dims = tl.arange(0, TILE_SPLITS), tl.arange(0, TILE_DIM)
    is_used = splits * _slice_size(num_keys, num_splits, TILE_KEYS) < num_keys
    is_used &= splits < num_splits
    slices = result * num_splits + splits
    log_sums = tl.load(log_sum_ptr + slices, mask=is_used, other=float("-inf"))
    maximum = tl.maximum(tl.max(log_sums, 0), -1e30)
    weights = tl.where(is_used, tl.exp2(log_sums - maximum), 0.0)
    partials = tl.load(
        partial_ptr + slices[:, None] * HEAD_DIM + dims[None],
        mask=is_used[:, None] & (dims < HEAD_DIM)[None],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    output = tl.sum(partials * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output_ptr + result * HEAD_DIM + dims, output, mask=dims < HEAD_DIM)


def choose_num_splits(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """How many programs share one (row, KV head): as many as keep all processors busy.

    Depends on nothing that changes between replays of a graph.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_rows * num_kv_heads)
    return min(_MAX_SPLITS, max(1, wanted))


def decode_attention(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    rows: DecodeRows,
    window: int | None,
    num_splits: int,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [rows, num_heads * head_dim] of one new token a row, whose KV is written.

    `query`: [rows, num_heads, head_dim], rows any stride apart; `layer_cache`:
    [blocks, 2, num_kv_heads, block_size, head_dim], blocks any stride apart. With `scales`,
    float32 [blocks, 2, num_kv_heads, block_size], it holds the bits of e4m3 numbers.
    """
    num_rows, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = layer_cache.shape
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, query.dtype)
    output = query.new_empty(num_rows, num_heads * head_dim)
    partials, log_sums = output, output
    if num_splits > 1:
        sizes = (num_rows, num_heads, num_splits)
        partials = query.new_empty(*sizes, head_dim, dtype=torch.float32)
        log_sums = query.new_empty(sizes, dtype=torch.float32)
    decode_kernel[(num_rows, num_kv_heads, num_splits)](
        partials,
        log_sums,
        query,
        layer_cache,
        layer_cache if scales is None else scales,
        rows.block_tables,
        rows.lengths,
        shape.scale_log2,
        query.stride(0),
        layer_cache.stride(0),
        0 if scales is None else scales.stride(0),
        rows.block_tables.stride(0),
        num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=shape.group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        IS_SPLIT=num_splits > 1,
        IS_FP8=scales is not None,
        TILE_GROUP=max(MIN_DOT, triton.next_power_of_2(shape.group)),
        TILE_DIM=shape.tile_dim,
        TILE_KEYS=shape.tile_keys,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if num_splits > 1:
        combine_kernel[(num_rows, num_heads)](
            output,
            partials,
            log_sums,
            rows.lengths,
            num_splits,
            HEAD_DIM=head_dim,
            WINDOW=window or 0,
            TILE_SPLITS=triton.next_power_of_2(num_splits),
            TILE_DIM=shape.tile_dim,
            TILE_KEYS=shape.tile_keys,
            num_warps=4,
        )
    return output
