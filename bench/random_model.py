"""Random models as model folders: nothing to download, any shape. Needs no torch."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WEIGHTS = "model.safetensors"

_FIXED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    # A tied one would make the newest token the likeliest next.
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def write_random_model(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Writes a Llama in float32 with a tokenizer of bytes into `folder`, which exists.

    `config` says of config.json what is not the same for all: the sizes.
    """
    write_all_but_weights(folder, config)
    save_file(dict(draw_weights(config, seed)), folder / WEIGHTS, metadata={"format": "pt"})


def write_all_but_weights(folder: Path, config: dict[str, Any]) -> None:
    """Config and tokenizer of `write_random_model`."""
    (folder / "config.json").write_text(json.dumps({**_FIXED, **config}, indent=2))
    _tokenizer().save(str(folder / "tokenizer.json"))


def draw_weights(
    config: dict[str, Any], seed: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Name and value of every tensor of the model, in float32."""
    rng = np.random.default_rng(seed)
    for name, shape in _shapes(config):
        yield f"{name}.weight", _draw(rng, shape)


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """`folder`, filled by `write` if it is not there yet; never seen half filled."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".make-", dir=folder.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        write(built)
        built.rename(folder)
    return folder


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Matrices keep the length of what they multiply; vectors are norms' weights."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Llama checkpoint."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    heads_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj", (heads_size, hidden)
        yield f"{prefix}.self_attn.k_proj", (kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj", (kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj", (hidden, heads_size)
        yield f"{prefix}.mlp.gate_proj", (intermediate, hidden)
        yield f"{prefix}.mlp.up_proj", (intermediate, hidden)
        yield f"{prefix}.mlp.down_proj", (hidden, intermediate)
        yield f"{prefix}.input_layernorm", (hidden,)
        yield f"{prefix}.post_attention_layernorm", (hidden,)
    yield "model.norm", (hidden,)
    yield "lm_head", (config["vocab_size"], hidden)


def _tokenizer() -> Tokenizer:
    """One token a byte; the ids above are never text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
