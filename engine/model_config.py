"""The architecture of a model, read from a Hugging Face folder's config.json.

Everything the decoder needs to know is resolved here, once: which biases and norms exist,
which layers look through a sliding window, how positions are rotated. What this engine does
not compute exactly is refused with a StartupError, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import StartupError
from engine.rope import RopeConfig, positive_number

RawConfig = Mapping[str, Any]


@dataclass(frozen=True)
class _Architecture:
    """What a class of transformers fixes, and its defaults for keys that config.json omits."""

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None
    """None: as `attention_bias` says, for o_proj too. Else q, k and v only."""
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_window_per_layer: bool = False
    """Whether `use_sliding_window` and `layer_types` choose the layers; else all have it."""


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture(
        {"max_position_embeddings": 2048, "sliding_window": None}, reads_mlp_bias=True
    ),
    "MistralForCausalLM": _Architecture(
        {
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
        qkv_bias=False,
    ),
    "Qwen2ForCausalLM": _Architecture(
        {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
        },
        qkv_bias=True,
        has_window_per_layer=True,
    ),
    "Qwen3ForCausalLM": _Architecture(
        {
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        has_qk_norm=True,
        has_window_per_layer=True,
    ),
}
_COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_window_layers": 28,
}
_MAX_LAYERS = 4096
_INT32_MAX = 2**31 - 1
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest context, in tokens."""
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer, how many of the latest tokens a token sees, itself included; None: all."""
    rope: RopeConfig
    dtype: str | None
    """Dtype of the weights as the folder declares it; None when it does not."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads `folder`/config.json. Raises StartupError in one line."""
        if not folder.is_dir():
            raise StartupError(f"model folder {folder} does not exist")
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise StartupError(f"model folder {folder} has no config.json") from None
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error
        if not isinstance(raw, dict):
            raise StartupError(f"{path} is not a JSON object")
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: RawConfig) -> ModelConfig:
        """Resolves a config.json with transformers' defaults. Raises StartupError."""
        name = _architecture_name(raw)
        architecture = _ARCHITECTURES[name]
        keys = {**_COMMON_DEFAULTS, **architecture.defaults, **raw}
        _refuse_unsupported(keys)
        num_heads = _positive(keys, "num_attention_heads")
        hidden_size = _positive(keys, "hidden_size")
        num_layers = _positive(keys, "num_hidden_layers", most=_MAX_LAYERS)
        num_kv_heads = _positive(keys, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise StartupError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        head_dim = _positive(keys, "head_dim", hidden_size // num_heads)
        max_positions = _positive(keys, "max_position_embeddings")
        flag = bool(keys.get("attention_bias", False))
        return cls(
            architecture=name,
            vocab_size=_positive(keys, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(keys, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_number(keys, "rms_norm_eps"),
            max_position_embeddings=max_positions,
            has_qkv_bias=flag if architecture.qkv_bias is None else architecture.qkv_bias,
            has_o_bias=flag if architecture.qkv_bias is None else False,
            has_mlp_bias=architecture.reads_mlp_bias and bool(keys.get("mlp_bias", False)),
            has_qk_norm=architecture.has_qk_norm,
            has_tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
            windows=_windows(keys, architecture, num_layers),
            rope=RopeConfig.from_hf(keys, head_dim, max_positions),
            dtype=_declared_dtype(keys),
        )


def _architecture_name(raw: RawConfig) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise StartupError(f"config.json: architectures must be a list, is {names!r}")
    for name in names:
        if name in _ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or "none named"
    raise StartupError(
        f"architecture not supported: {found}; supported: {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(keys: RawConfig) -> None:
    if keys["hidden_act"] != "silu":
        raise StartupError(f"hidden_act {keys['hidden_act']!r} is not supported; supported: silu")
    if keys.get("quantization_config"):
        method = keys["quantization_config"].get("quant_method", "unnamed")
        raise StartupError(
            f"quantized weights ({method}) are not supported; supported: {', '.join(_DTYPES)}"
        )


def _positive(
    keys: RawConfig, name: str, default: int | None = None, most: int = _INT32_MAX
) -> int:
    """The integer `keys[name]`, up to `most`; `default` where it is absent or null."""
    value = keys.get(name)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise StartupError(f"config.json: {name} must be a positive integer, is {value!r}")
    if value > most:
        raise StartupError(f"config.json: {name} must be at most {most}, is {value!s:.12}")
    return value


def _windows(
    keys: RawConfig, architecture: _Architecture, num_layers: int
) -> tuple[int | None, ...]:
    if keys["sliding_window"] is None:
        return (None,) * num_layers
    window = _positive(keys, "sliding_window")
    if not architecture.has_window_per_layer:
        # LlamaForCausalLM ignores the key.
        is_read = architecture.defaults["sliding_window"] is not None
        return (window if is_read else None,) * num_layers
    if not keys.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = keys.get("layer_types")
    if layer_types is None:
        first = keys["max_window_layers"]
        if not isinstance(first, int):
            raise StartupError(f"config.json: max_window_layers must be an integer, is {first!r}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list):
        raise StartupError(f"config.json: layer_types must be a list, is {layer_types!r}")
    if len(layer_types) != num_layers:
        raise StartupError(
            f"config.json: layer_types has {len(layer_types)} entries for {num_layers} layers"
        )
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for name in layer_types:
        if name not in known:
            raise StartupError(
                f"layer type {name!r} is not supported; supported: {', '.join(known)}"
            )
    return tuple(known[name] for name in layer_types)


def _declared_dtype(keys: RawConfig) -> str | None:
    """`dtype` (transformers 5) or `torch_dtype` (older)."""
    declared = keys.get("dtype") or keys.get("torch_dtype")
    if declared is None:
        return None
    name = str(declared).removeprefix("torch.")
    if name not in _DTYPES:
        raise StartupError(f"dtype {name} is not supported; supported: {', '.join(_DTYPES)}")
    return name
