"""Small random models as Hugging Face folders, with a tokenizer and a chat template.

The weights are drawn large enough that greedy outputs wander instead of repeating one token,
and from a fixed seed, so that every process that builds a variant builds the same one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 288
BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Variant:
    """One architecture with its settings; `settings` override the small defaults."""

    name: str
    config_class: type[transformers.PreTrainedConfig]
    settings: dict[str, Any] = field(default_factory=dict)


def _rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **values}}


_LLAMA, _MISTRAL = transformers.LlamaConfig, transformers.MistralConfig
_QWEN2, _QWEN3 = transformers.Qwen2Config, transformers.Qwen3Config

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("llama", _LLAMA),
        Variant("llama-tied", _LLAMA, {"tie_word_embeddings": True}),
        Variant("llama-biases", _LLAMA, {"attention_bias": True, "mlp_bias": True}),
        Variant("llama-one-kv-head", _LLAMA, {"num_key_value_heads": 1}),
        Variant("llama-head-dim", _LLAMA, {"head_dim": 24}),
        Variant("llama-linear", _LLAMA, _rope("linear", factor=3.0)),
        Variant("llama-dynamic", _LLAMA, _rope("dynamic", factor=2.5)),
        Variant(
            "llama-llama3",
            _LLAMA,
            _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        Variant(
            "llama-yarn",
            _LLAMA,
            _rope("yarn", factor=4.0, original_max_position_embeddings=128),
        ),
        Variant("mistral", _MISTRAL, {"sliding_window": None}),
        Variant("mistral-window", _MISTRAL, {"sliding_window": 21}),
        Variant("qwen2", _QWEN2),
        Variant(
            "qwen2-window",
            _QWEN2,
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        ),
        Variant(
            "qwen2-yarn-mscale",
            _QWEN2,
            _rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                mscale=0.7,
                mscale_all_dim=0.4,
                beta_fast=16.0,
                truncate=False,
            ),
        ),
        Variant("qwen3", _QWEN3, {"head_dim": 32}),
        Variant("qwen3-tied-bias", _QWEN3, {"tie_word_embeddings": True, "attention_bias": True}),
        Variant(
            "qwen3-layer-types",
            _QWEN3,
            {
                "use_sliding_window": True,
                "sliding_window": 18,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
    )
}


def build(folder: Path, name: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """Writes the variant into `folder`: config, safetensors, tokenizer, chat template."""
    model = random_model(VARIANTS[name], seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def random_model(variant: Variant, seed: int = 0) -> transformers.PreTrainedModel:
    """The variant in float32, every tensor drawn from `seed`."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
        **_rope("default"),
    }
    config = variant.config_class(**{**settings, **variant.settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            # Small embeddings leave the last word to the layers, not to the newest token.
            scale = 0.05 if "embed_tokens" in name else 0.2
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(mean + scale * noise)
    return model.eval()


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token b is byte b, then the special tokens, then fillers."""
    alphabet = _byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    num_fillers = VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)
    tokenizer.add_tokens([f"<filler{index}>" for index in range(num_fillers)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _byte_alphabet() -> list[str]:
    """The character with which byte-level BPE writes each byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
