"""The compiled attention at the sizes of real models, and what it does not take."""

from __future__ import annotations

import pytest
import torch

from engine.attention import ReferenceAttention, SequenceChunk
from engine.attention.native import NativeAttention, unsupported
from engine.kv_cache import BlockShape, KVCache
from tests.engine.kernels import native_library

CPU = torch.device("cpu")
LENGTHS = ((0, 1), (40, 1), (299, 1), (0, 70), (130, 90), (11, 3))
"""(tokens before, tokens of the step) of each sequence: over several tiles of keys."""


def chunks_of(block_size: int, num_blocks: int) -> list[SequenceChunk]:
    """Sequences of LENGTHS over scattered blocks."""
    generator = torch.Generator().manual_seed(3)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    chunks = []
    for start, num_tokens in LENGTHS:
        count = -(-(start + num_tokens) // block_size)
        chunks.append(SequenceChunk(start, num_tokens, free[:count]))
        free = free[count:]
    return chunks


def make_cache(heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVCache:
    num_blocks = 800 // block_size + len(LENGTHS)
    cache = KVCache(BlockShape(2, heads, block_size, head_dim, dtype), num_blocks, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(4)))
    return cache


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (16, 4, 64, 32), (8, 1, 128, 64), (5, 5, 80, 16), (14, 2, 48, 7)],
)
def test_real_shapes_equal_the_reference(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None,
) -> None:
    caches = [make_cache(num_kv_heads, head_dim, block_size, dtype) for _ in range(2)]
    chunks = chunks_of(block_size, caches[0].num_blocks)
    slots = [
        chunk.block_table[position // block_size] * block_size + position % block_size
        for chunk in chunks
        for position in range(chunk.start, chunk.end)
    ]
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(len(slots), num_heads, head_dim, generator=generator).to(dtype)
    key_value = torch.randn(len(slots), 2, num_kv_heads, head_dim, generator=generator).to(dtype)
    own = NativeAttention(caches[0], native_library(dtype)).prepare(chunks, slots)
    reference = ReferenceAttention(caches[1]).prepare(chunks, slots)
    output = own.attend(1, query, key_value, window)
    expected = reference.attend(1, query, key_value, window)
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(caches[0].data, caches[1].data)


@pytest.mark.parametrize(
    ("shape", "num_heads", "reason"),
    [
        (BlockShape(1, 2, 16, 64, torch.float16), 4, "dtype torch.float16"),
        (BlockShape(1, 2, 16, 24, torch.float32), 4, "head_dim 24"),
        (BlockShape(1, 2, 16, 272, torch.float32), 4, "head_dim 272"),
        (BlockShape(1, 1, 16, 64, torch.float32), 71, "71 query heads for one KV head"),
        (BlockShape(1, 2, 16, 64, torch.float32), 4, None),
    ],
)
def test_shapes_that_the_kernels_cannot_serve_are_named(
    shape: BlockShape, num_heads: int, reason: str | None
) -> None:
    assert unsupported(native_library(torch.float32), shape, num_heads) == reason
