"""Frequencies and attention factors equal those of transformers, both spellings of the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from core.errors import StartupError
from engine.rope import Rope, RopeConfig, inverse_frequencies, rotate

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with betas": {**YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn with mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn with mscale alone": {**YARN, "mscale": 0.707},
    "yarn with attention factor": {**YARN, "attention_factor": 1.2},
}


def keys_of(**values: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 2048, "hidden_size": 256, "num_attention_heads": 4, **values}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_frequencies_equal_those_of_transformers(name: str, spelling: str) -> None:
    scaling = SCALINGS[name]
    if spelling == "rope_parameters":
        keys = keys_of(rope_parameters={**scaling, "rope_theta": 50000.0})
    else:
        keys = keys_of(rope_scaling=dict(scaling), rope_theta=50000.0)
    own = RopeConfig.from_hf(keys, 64, 2048)
    reference = LlamaRotaryEmbedding(transformers.LlamaConfig(**keys))
    torch.testing.assert_close(inverse_frequencies(own), reference.inv_freq, rtol=2e-7, atol=0)
    assert own.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


def test_rotation_equals_that_of_transformers() -> None:
    keys = keys_of(rope_parameters={**YARN, "rope_theta": 50000.0})
    positions = torch.tensor([0, 1, 7, 2000])
    x = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(transformers.LlamaConfig(**keys))(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1), x.transpose(0, 1), cos[0], sin[0], 0)
    rope = Rope(RopeConfig.from_hf(keys, 64, 2048), torch.device("cpu"))
    own = rotate(x, *rope.angles(positions, torch.float32))
    torch.testing.assert_close(own, expected.transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_the_old_key_type_is_read() -> None:
    keys = keys_of(rope_scaling={"type": "linear", "factor": 2.0})
    assert RopeConfig.from_hf(keys, 64, 2048) == RopeConfig(64, 10000.0, "linear", 2.0)


def test_a_null_yarn_factor_is_the_ratio_of_the_lengths() -> None:
    keys = keys_of(rope_parameters={**YARN, "factor": None})
    assert RopeConfig.from_hf(keys, 64, 2048).factor == 4.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope"}, "rope type 'longrope'.*supported: default, linear"),
        ({"rope_type": "linear"}, "factor must be a positive number, is None"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor must be a positive number"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "is not supported"),
    ],
)
def test_a_scaling_that_is_not_built_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        RopeConfig.from_hf(keys_of(rope_parameters=scaling), 64, 2048)
