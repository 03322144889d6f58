"""Whole layers in one call, against the same kernels called one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import AttentionBackend, SequenceChunk
from engine.attention.native import NativeAttention
from engine.cpu_kernels import Kernels
from engine.decoder import Decoder, DecoderWeights
from engine.kv_cache import BlockShape, KVCache
from engine.linear import Linear
from engine.matrices import MatrixStorage
from engine.model_config import ModelConfig
from engine.native.decoder import NativeDecoder
from engine.native.linear import NativePacker
from engine.native.ops import NativeOps
from engine.weights import load_weights
from tests import tiny_models
from tests.engine.kernels import native_library

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 8
CHUNKS = (SequenceChunk(20, 1, [3, 0]), SequenceChunk(0, 21, [1, 5]), SequenceChunk(7, 1, [4]))


def load(folder: Path, dtype: torch.dtype) -> tuple[ModelConfig, DecoderWeights]:
    library = native_library(dtype)
    if not library.packs:
        pytest.skip(f"this CPU has no instructions for {dtype}")
    config = ModelConfig.from_folder(folder)
    storage = MatrixStorage(dtype, NativePacker(library, dtype), None, None)
    return config, load_weights(folder, config, storage, CPU, print)


def make_cache(config: ModelConfig, dtype: torch.dtype) -> KVCache:
    shape = BlockShape(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    cache = KVCache(shape, NUM_BLOCKS, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def run(decoder: Decoder, attention: AttentionBackend) -> tuple[torch.Tensor, list[int]]:
    """Hidden states of CHUNKS, and what the hook was told."""
    places = [(chunk, p) for chunk in CHUNKS for p in range(chunk.start, chunk.end)]
    slots = [
        chunk.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for chunk, p in places
    ]
    layers: list[int] = []
    with torch.inference_mode():
        hidden = decoder.forward(
            torch.arange(len(places)) % decoder.config.vocab_size,
            torch.tensor([p for _, p in places]),
            attention.prepare(CHUNKS, slots),
            layers.append,
        )
    return hidden, layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_layers_at_once_equal_their_operations_to_the_bit(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config, weights = load(tiny_models.build(tmp_path, name), dtype)
    library = native_library(dtype)
    decoders = (
        NativeDecoder(config, weights, library),
        Decoder(config, weights, NativeOps(library)),
    )
    caches = [make_cache(config, dtype) for _ in decoders]
    results = [
        run(decoder, NativeAttention(cache, library))
        for decoder, cache in zip(decoders, caches, strict=True)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == list(range(1, config.num_layers + 1))
    assert torch.equal(caches[0].data, caches[1].data)


def test_a_layer_with_a_matrix_that_is_not_packed_is_computed_one_operation_at_a_time(
    tmp_path: Path,
) -> None:
    config, weights = load(tiny_models.build(tmp_path, "llama"), torch.float32)
    library = native_library(torch.float32)
    kernels = Kernels(NativeOps(library), None, None, library)
    assert isinstance(kernels.decoder(config, weights), NativeDecoder)
    down: Linear = weights.layers[-1].down
    down.replace(lambda x: x)
    assert not isinstance(kernels.decoder(config, weights), NativeDecoder)
