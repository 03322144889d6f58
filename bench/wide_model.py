"""A random model with much KV for its computation: 64 KiB a token in float32.

SmolLM2 has 45 KiB a token and takes several times as long to prefill one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.random_model import made_once, write_random_model
from engine.fetch_smollm2 import default_folder

NAME = "random-wide"
SEED = 20
CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}


def wide_model() -> Path:
    """The model's folder, beside SmolLM2's; made if it is not there yet."""
    return made_once(
        default_folder().with_name(NAME), lambda folder: write_random_model(folder, CONFIG, SEED)
    )
