"""bfloat16 on every way of computing: logits stay near those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import ReferenceAttention, SequenceChunk
from engine.cpu_kernels import choose_kernels
from engine.kv_cache import BlockShape, KVCache
from engine.model_config import ModelConfig
from engine.weights import load_weights
from tests import tiny_models
from tests.engine.harness import make_prompt

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT = make_prompt(60)


def logits_of(folder: Path, kernels_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Of every position of PROMPT, float32 [60, vocab]; "reference" is the specification."""
    config = ModelConfig.from_folder(folder)
    is_reference = kernels_name == "reference"
    kernels = choose_kernels("torch" if is_reference else kernels_name, dtype, CPU, print)
    weights = load_weights(folder, config, dtype, CPU, print, kernels.pack)
    shape = BlockShape(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    cache = KVCache(shape, num_blocks=4, device=CPU)
    attention = kernels.attention(cache, config.num_heads, print)
    if is_reference:
        attention = ReferenceAttention(cache)
    step = attention.prepare([SequenceChunk(0, len(PROMPT), [2, 0, 3, 1])], _slots([2, 0, 3, 1]))
    decoder = kernels.decoder(config, weights)
    with torch.inference_mode():
        ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
        return decoder.logits(decoder.forward(ids, positions, step)).float()


def _slots(blocks: list[int]) -> list[int]:
    return [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(len(PROMPT))
    ]


@pytest.mark.parametrize("kernels_name", ["native", "torch"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "mistral-window"])
def test_logits_err_no_more_than_half_again_what_the_reference_does(
    name: str, kernels_name: str, tmp_path: Path
) -> None:
    folder = tiny_models.build(tmp_path, name)
    exact = logits_of(folder, "reference", torch.float32)

    def error_of(kernels_name: str) -> float:
        logits = logits_of(folder, kernels_name, torch.bfloat16)
        return float((logits - exact).square().mean().sqrt())

    assert error_of(kernels_name) <= 1.5 * error_of("reference")
    assert error_of(kernels_name) <= 0.05 * float(exact.std())
