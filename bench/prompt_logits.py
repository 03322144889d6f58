"""Logits of a whole prompt on a CPU, without scheduler and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.attention import ReferenceAttention, SequenceChunk
from engine.cpu_kernels import choose_kernels
from engine.kv_cache import BlockShape, KVCache
from engine.model_config import ModelConfig
from engine.quantization.weight import Code
from engine.weights import load_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def prompt_logits(
    folder: Path,
    ids: Sequence[int],
    kernels_name: str,
    dtype: torch.dtype,
    scheme: Code | None = None,
) -> torch.Tensor:
    """Of every position, float32 [tokens, vocab]. `kernels_name` as EngineConfig.cpu_kernels has
    it, or "reference": PyTorch's, with the attention that is the specification."""
    config = ModelConfig.from_folder(folder)
    is_reference = kernels_name == "reference"
    kernels = choose_kernels("torch" if is_reference else kernels_name, dtype, CPU, _silent)
    storage = kernels.storage(dtype, scheme)
    weights = load_weights(folder, config, storage, CPU, _silent)
    shape = BlockShape(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    # No block follows its neighbour.
    table = list(reversed(range(-(-len(ids) // BLOCK_SIZE))))
    cache = KVCache(shape, len(table), CPU)
    attention = kernels.attention(cache, config.num_heads, _silent)
    if is_reference:
        attention = ReferenceAttention(cache)
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(ids))]
    step = attention.prepare([SequenceChunk(0, len(ids), table)], slots)
    decoder = kernels.decoder(config, weights)
    with torch.inference_mode():
        positions = torch.arange(len(ids))
        return decoder.logits(decoder.forward(torch.tensor(ids), positions, step)).float()


def divergence(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Kullback-Leibler of the next token's distributions, in nats; mean over positions."""
    exact, logits = exact.log_softmax(-1), logits.log_softmax(-1)
    return float((exact.exp() * (exact - logits)).sum(-1).mean())


def _silent(message: str) -> None:
    del message
