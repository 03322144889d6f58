"""A random model with much KV for its computation: 64 KiB a token in float32.

SmolLM2 has 45 KiB a token and takes several times as long to prefill one.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.fetch_smollm2 import default_folder

NAME = "random-wide"
SEED = 20
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def wide_model() -> Path:
    """The model's folder, beside SmolLM2's; made if it is not there yet."""
    folder = default_folder().with_name(NAME)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".make-", dir=folder.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        (built / "config.json").write_text(json.dumps(CONFIG))
        _tokenizer().save(str(built / "tokenizer.json"))
        save_file(_weights(), built / "model.safetensors", metadata={"format": "pt"})
        built.rename(folder)
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    hidden, intermediate = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    heads_size = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv_size = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {
        "self_attn.q_proj": (heads_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, heads_size),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    weights = {"model.embed_tokens": random(CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}": random(*shape) for name, shape in shapes.items()}
        weights[f"{prefix}.input_layernorm"] = torch.ones(hidden)
        weights[f"{prefix}.post_attention_layernorm"] = torch.ones(hidden)
    weights["model.norm"] = torch.ones(hidden)
    return {f"{name}.weight": weight for name, weight in weights.items()}


def _tokenizer() -> Tokenizer:
    """One token a byte; the ids above are never text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
