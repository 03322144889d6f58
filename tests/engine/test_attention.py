"""The attention backends against the reference, and the reference in low precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.attention import AttentionBackend, GatherAttention, ReferenceAttention, SequenceChunk
from engine.attention.native import NativeAttention
from engine.kv_cache import BlockShape, KVCache
from tests.engine.kernels import native_library

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 16, 4, 24
CHUNKS = {
    "one token": [SequenceChunk(0, 1, [3])],
    "one prompt": [SequenceChunk(0, 9, [5, 2, 9])],
    "a later chunk": [SequenceChunk(7, 6, [5, 2, 9, 0])],
    "decodes of mixed lengths": [
        SequenceChunk(0, 1, [1]),
        SequenceChunk(15, 1, [5, 2, 9, 0]),
        SequenceChunk(16, 1, [10, 11, 12, 13, 14]),
    ],
    "decodes and chunks": [
        SequenceChunk(6, 1, [1, 7]),
        SequenceChunk(0, 5, [2, 3]),
        SequenceChunk(4, 1, [4, 5]),
        SequenceChunk(5, 8, [10, 11, 12, 13]),
    ],
    "a table longer than its use": [SequenceChunk(2, 1, [8, 6, 4]), SequenceChunk(0, 2, [1, 0])],
}


Backend = Callable[[KVCache], AttentionBackend]


def native(cache: KVCache) -> AttentionBackend:
    return NativeAttention(cache, native_library(cache.shape.dtype))


def make_cache(dtype: torch.dtype, seed: int = 0) -> KVCache:
    cache = KVCache(BlockShape(2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype), NUM_BLOCKS, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=generator(seed)))
    return cache


CPU = torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slots_of(chunks: list[SequenceChunk]) -> list[int]:
    return [
        chunk.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for chunk in chunks
        for position in range(chunk.start, chunk.end)
    ]


def inputs_of(chunks: list[SequenceChunk], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator(1))
    key_value = torch.randn(num_tokens, 2, NUM_KV_HEADS, HEAD_DIM, generator=generator(2))
    return query.to(dtype), key_value.to(dtype)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("backend", [GatherAttention, native])
def test_a_backend_equals_the_reference(backend: Backend, name: str, window: int | None) -> None:
    chunks = CHUNKS[name]
    query, key_value = inputs_of(chunks, torch.float32)
    own, reference = make_cache(torch.float32), make_cache(torch.float32)
    for layer in (0, 1):
        step = backend(own).prepare(chunks, slots_of(chunks))
        expected_step = ReferenceAttention(reference).prepare(chunks, slots_of(chunks))
        output = step.attend(layer, query, key_value, window)
        expected = expected_step.attend(layer, query, key_value, window)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(own.data, reference.data)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (GatherAttention, torch.bfloat16),
        (GatherAttention, torch.float16),
        (native, torch.bfloat16),
    ],
)
def test_low_precision_errs_no_more_than_twice_the_reference(
    backend: Backend, dtype: torch.dtype
) -> None:
    chunks = CHUNKS["decodes and chunks"]
    query, key_value = inputs_of(chunks, dtype)

    def error_of(backend: Backend) -> float:
        step = backend(make_cache(dtype)).prepare(chunks, slots_of(chunks))
        return float((step.attend(0, query, key_value, None).double() - exact).abs().max())

    precise = make_cache(dtype)
    yardstick = KVCache(
        BlockShape(2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, torch.float64), NUM_BLOCKS, CPU
    )
    yardstick.data.copy_(precise.data)
    step = ReferenceAttention(yardstick).prepare(chunks, slots_of(chunks))
    exact = step.attend(0, query.double(), key_value.double(), None)
    assert error_of(backend) <= 2 * error_of(ReferenceAttention)


@pytest.mark.parametrize("backend", [GatherAttention, ReferenceAttention, native])
def test_a_slot_of_minus_one_writes_nothing(backend: Backend) -> None:
    cache = make_cache(torch.float32)
    before = cache.data.clone()
    chunks = CHUNKS["decodes of mixed lengths"]
    query, key_value = inputs_of(chunks, torch.float32)
    backend(cache).prepare(chunks, [-1, 8, -1]).attend(1, query, key_value, None)
    assert torch.equal(cache.layer(1)[2, :, :, 0], key_value[1])
    cache.layer(1)[2, :, :, 0] = before[2, 1, :, :, 0]
    assert torch.equal(cache.data, before)


@pytest.mark.parametrize("backend", [GatherAttention, native])
def test_padding_reads_no_block_of_another_sequence(backend: Backend) -> None:
    chunks = [SequenceChunk(1, 1, [4]), SequenceChunk(9, 1, [5, 6, 7])]
    query, key_value = inputs_of(chunks, torch.float32)
    cache = make_cache(torch.float32)
    cache.data[[0, 1, 2, 3]] = float("nan")
    output = backend(cache).prepare(chunks, slots_of(chunks)).attend(0, query, key_value, None)
    assert output.isfinite().all()
