"""A random Llama of 246 million parameters in bfloat16: small, but larger than any cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.random_model import WEIGHTS, draw_weights, made_once, write_all_but_weights
from engine.fetch_smollm2 import default_folder

NAME = "random-246m"
SEED = 246
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}


def small_model() -> Path:
    """The model's folder, beside SmolLM2's; made if it is not there yet."""
    return made_once(default_folder().with_name(NAME), _write)


def _write(folder: Path) -> None:
    write_all_but_weights(folder, CONFIG)
    weights = {
        name: torch.from_numpy(values).bfloat16() for name, values in draw_weights(CONFIG, SEED)
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
