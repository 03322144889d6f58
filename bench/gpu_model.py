"""Models and steps for bench.gpu: random weights made on the device, sequences that need none.

A step here is what the scheduler would give to the runner, with block tables of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.sampling import SamplingParams
from engine.attention.triton import TritonAttention, TritonSettings
from engine.batch import ScheduledSequence, StepBatch
from engine.decoder import DecoderWeights, LayerWeights
from engine.kv_cache import BlockShape, KVCache
from engine.linear import Linear
from engine.model_config import ModelConfig
from engine.sequence import Sequence
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import GraphModel

BLOCK_SIZE = 16
_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA_8B: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""For runs that only show that everything is wired up."""


class RunAgain:
    """Stands for a recorder where there are no graphs: what was recorded is run again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work`, as recording would."""
        work()
        return work


@dataclass(frozen=True)
class Rates:
    """What the device does at best, measured in the same run."""

    bytes_per_s: float
    """Read and written by a copy of a buffer much larger than any cache."""
    flop_per_s: float
    """Of a large matrix product in the model's dtype."""


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Weights that keep activations of one size, drawn on the device."""

    def tensor(*sizes: int) -> torch.Tensor:
        if len(sizes) == 1:
            return torch.ones(sizes, dtype=dtype, device=device)
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0, sizes[-1] ** -0.5)

    def layer() -> LayerWeights:
        hidden, inner = config.hidden_size, config.intermediate_size
        return LayerWeights(
            input_norm=tensor(hidden),
            qkv=Linear(tensor(config.q_size + 2 * config.kv_size, hidden), None),
            q_norm=None,
            k_norm=None,
            output=Linear(tensor(hidden, config.q_size), None),
            post_attention_norm=tensor(hidden),
            gate_up=Linear(tensor(2 * inner, hidden), None),
            down=Linear(tensor(hidden, inner), None),
        )

    return DecoderWeights(
        embedding=tensor(config.vocab_size, config.hidden_size),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=tensor(config.hidden_size),
        lm_head=Linear(tensor(config.vocab_size, config.hidden_size), None),
    )


def random_model(
    raw: dict[str, Any], num_blocks: int, dtype: torch.dtype, device: torch.device
) -> GraphModel:
    """A model of that shape over a cache of `num_blocks`, which is filled with numbers."""
    config = ModelConfig.from_hf(raw)
    decoder = TritonDecoder(config, random_weights(config, dtype, device))
    shape = BlockShape(config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    cache = KVCache(shape, num_blocks, device)
    cache.data.normal_()
    num_processors = 8
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    attention = TritonAttention(cache, TritonSettings(config.num_heads, num_processors))
    return GraphModel(decoder, attention, config.max_position_embeddings)


def matrix_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied with, the output matrix apart."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer


def decode_bytes(config: ModelConfig, num_rows: int, context: int, itemsize: int) -> int:
    """What a decode step must read at least: all matrices once, and every sequence's KV."""
    weights = matrix_parameters(config) + config.vocab_size * config.hidden_size
    kv = 2 * config.num_layers * config.kv_size * context * num_rows
    return (weights + kv) * itemsize


def prefill_flop(config: ModelConfig, num_tokens: int) -> int:
    """Of one prompt: products with matrices, and the half of attention that is causal."""
    attention = 2 * config.num_layers * config.q_size * num_tokens * num_tokens
    return 2 * matrix_parameters(config) * num_tokens + attention


def decode_step(num_rows: int, context: int) -> StepBatch:
    """`num_rows` sequences whose newest token is their `context`th, no block shared."""
    per_row = -(-context // BLOCK_SIZE)
    tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(num_rows)]
    return StepBatch(
        tuple(
            ScheduledSequence.of(_sequence(row, context, table), context - 1, 1)
            for row, table in enumerate(tables)
        )
    )


def prefill_step(num_tokens: int) -> StepBatch:
    """One whole prompt."""
    sequence = _sequence(0, num_tokens, list(range(-(-num_tokens // BLOCK_SIZE))))
    return StepBatch((ScheduledSequence.of(sequence, 0, num_tokens),))


def _sequence(row: int, num_tokens: int, block_table: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=row)
    tokens = [(7 * row + position) % 256 for position in range(num_tokens)]
    return Sequence(str(row), 1, tokens, params, bytes(16), block_table=block_table)
