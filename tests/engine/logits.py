"""Logits of a whole prompt, without scheduler and sampler."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from engine.attention import ReferenceAttention, SequenceChunk
from engine.cpu_kernels import choose_kernels
from engine.decoder import Decoder
from engine.kv_cache import BlockShape, KVCache
from engine.model_config import ModelConfig
from engine.quantization.weight import Code
from engine.weights import load_weights
from tests.engine.harness import make_prompt

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PROMPT = make_prompt(60)
_TABLE = [2, 0, 3, 1]


def logits_of(
    folder: Path, kernels_name: str, dtype: torch.dtype, scheme: Code | None = None
) -> torch.Tensor:
    """Of every position of PROMPT, float32 [60, vocab]; "reference" is the specification."""
    config = ModelConfig.from_folder(folder)
    is_reference = kernels_name == "reference"
    kernels = choose_kernels("torch" if is_reference else kernels_name, dtype, CPU, print)
    weights = load_weights(folder, config, kernels.storage(dtype, scheme, print), CPU, print)
    shape = BlockShape(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    cache = KVCache(shape, num_blocks=4, device=CPU)
    attention = kernels.attention(cache, config.num_heads, print)
    if is_reference:
        attention = ReferenceAttention(cache)
    slots = [_TABLE[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(PROMPT))]
    step = attention.prepare([SequenceChunk(0, len(PROMPT), _TABLE)], slots)
    decoder = Decoder(config, weights, kernels.ops)
    with torch.inference_mode():
        ids, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
        return decoder.logits(decoder.forward(ids, positions, step)).float()


def reference_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """The same by transformers."""
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]
