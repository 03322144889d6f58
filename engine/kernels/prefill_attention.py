"""Paged attention of chunks of any length, each after a prefix that stands in the cache.

A program attends a few tokens with all the query heads of one KV head: its tile has a row for
each (token, head). Keys come from the blocks alone, those of the step's own tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.tiles import AttentionShape, score_tile, softmax_step


@dataclass(frozen=True)
class PrefillRows:
    """The chunks of a step, cut into tiles of tokens. int32, on the device."""

    block_tables: torch.Tensor
    """[chunks, blocks]; entries past a chunk's end are not read."""
    first_rows: torch.Tensor
    """[chunks + 1]: the row of `query` at which each chunk begins, and the end of the last."""
    starts: torch.Tensor
    """[chunks]: position of each chunk's first token."""
    tile_chunks: torch.Tensor
    """[tiles]: the chunk of each tile; -1 pads."""
    tile_tokens: torch.Tensor
    """[tiles]: the tile's first token, counted within its chunk."""


def tile_tokens(shape: AttentionShape) -> int:
    """Tokens of one tile."""
    return _tile_rows(shape) // int(triton.next_power_of_2(shape.group))


def cut_into_tiles(num_tokens: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(chunk, first token) of every tile; the longest work, each chunk's end, comes first."""
    return [
        (chunk, first)
        for chunk, count in enumerate(num_tokens)
        for first in reversed(range(0, count, size))
    ]


def _tile_rows(shape: AttentionShape) -> int:
    """Rows of a tile: as many as registers hold beside the running result."""
    if shape.dtype.itemsize > 2:
        # Masks of a head_dim that is no power of two take registers, too.
        is_wide = shape.tile_dim > 128 or shape.head_dim < shape.tile_dim
        rows = 16 if is_wide else 32
    else:
        rows = 64 if shape.tile_dim > 128 else 128
    if shape.is_fp8:
        rows = max(rows // 2, 16)
    return max(rows, int(triton.next_power_of_2(shape.group)))


def _num_warps(shape: AttentionShape) -> int:
    """More where a tile, or its rows, would not fit the registers of few."""
    rows = _tile_rows(shape)
    if shape.is_fp8:
        return 8 if rows > 32 else shape.num_warps
    return 8 if rows > 64 or shape.tile_dim > 128 else shape.num_warps


@triton.jit
def prefill_kernel(
    output_ptr,
    query_ptr,
    cache_ptr,
    scale_ptr,
    table_ptr,
    first_row_ptr,
    start_ptr,
    tile_chunk_ptr,
    tile_token_ptr,
    scale_log2,
    query_stride,
    block_stride,
    scale_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """One tile of (token, head) rows of one KV head. Grid: tiles, KV heads."""
    chunk = tl.load(tile_chunk_ptr + tl.program_id(0))
    if chunk < 0:
        return
    kv_head = tl.program_id(1)
    first_token = tl.load(tile_token_ptr + tl.program_id(0))
    first_row = tl.load(first_row_ptr + chunk)
    num_tokens = tl.load(first_row_ptr + chunk + 1) - first_row
    start = tl.load(start_ptr + chunk)
    rows, dims, keys = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_DIM), tl.arange(0, TILE_KEYS)
    tokens, heads = first_token + rows // TILE_GROUP, rows % TILE_GROUP
    is_real = ((tokens < num_tokens) & (heads < GROUP))[:, None] & (dims < HEAD_DIM)[None]
    head_offsets = (kv_head * GROUP + heads) * HEAD_DIM
    query_rows = (first_row + tokens).to(tl.int64)
    query = tl.load(
        query_ptr + (query_rows * query_stride + head_offsets)[:, None] + dims[None],
        mask=is_real,
        other=0.0,
    )
    key_ptr = cache_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    row_table_ptr = table_ptr + chunk.to(tl.int64) * table_stride
    positions = start + tokens
    end = start + tl.minimum(first_token + TILE_ROWS // TILE_GROUP, num_tokens)
    begin = tl.maximum(start + first_token - WINDOW + 1, 0) if WINDOW else 0
    weighted = tl.zeros([TILE_ROWS, TILE_DIM], tl.float32)
    maxima = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_ROWS], tl.float32)
    for first_key in range(begin, end, TILE_KEYS):
        key_positions = first_key + keys
        is_read = key_positions < end
        scores, values = score_tile(
            query,
            key_ptr,
            scale_ptr,
            kv_head,
            row_table_ptr,
            key_positions,
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
        is_seen = key_positions[None] <= positions[:, None]
        if WINDOW:
            is_seen &= key_positions[None] > positions[:, None] - WINDOW
        scores = tl.where(is_seen & is_read[None], scores, float("-inf"))
        weighted, maxima, sums = softmax_step(scores, values, weighted, maxima, sums)
    output = weighted / tl.where(sums == 0.0, 1.0, sums)[:, None]
    output_rows = query_rows * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head_offsets
    tl.store(output_ptr + output_rows[:, None] + dims[None], output, mask=is_real)


def prefill_attention(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    rows: PrefillRows,
    window: int | None,
    output: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Writes to `output` [T, num_heads * head_dim] the rows that belong to chunks.

    `query`: [T, num_heads, head_dim], rows any stride apart; `layer_cache`:
    [blocks, 2, num_kv_heads, block_size, head_dim], blocks any stride apart, which holds the
    chunks' own keys and values too. With `scales`, float32
    [blocks, 2, num_kv_heads, block_size], it holds the bits of e4m3 numbers.
    """
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = layer_cache.shape
    is_fp8 = scales is not None
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, query.dtype, is_fp8)
    prefill_kernel[(len(rows.tile_chunks), num_kv_heads)](
        output,
        query,
        layer_cache,
        layer_cache if scales is None else scales,
        rows.block_tables,
        rows.first_rows,
        rows.starts,
        rows.tile_chunks,
        rows.tile_tokens,
        shape.scale_log2,
        query.stride(0),
        layer_cache.stride(0),
        0 if scales is None else scales.stride(0),
        rows.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=shape.group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        IS_FP8=is_fp8,
        TILE_ROWS=_tile_rows(shape),
        TILE_GROUP=triton.next_power_of_2(shape.group),
        TILE_DIM=shape.tile_dim,
        TILE_KEYS=shape.tile_keys,
        num_warps=_num_warps(shape),
        num_stages=shape.num_stages,
    )
