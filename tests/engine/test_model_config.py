"""What config.json means, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import StartupError
from engine.model_config import ModelConfig


def keys_of(architecture: str = "LlamaForCausalLM", **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        **values,
    }


def test_llama_derives_heads_and_head_dim_from_the_hidden_size() -> None:
    config = ModelConfig.from_hf(keys_of())
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert config.windows == (None, None, None, None)
    assert config.has_tied_embeddings is False


def test_llama_ignores_a_sliding_window() -> None:
    assert ModelConfig.from_hf(keys_of(sliding_window=7)).windows == (None,) * 4


def test_the_attention_bias_of_llama_and_qwen3_covers_the_output_projection() -> None:
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        config = ModelConfig.from_hf(
            keys_of(architecture, attention_bias=True, num_key_value_heads=2)
        )
        assert (config.has_qkv_bias, config.has_o_bias) == (True, True)


def test_qwen2_has_a_bias_on_queries_keys_and_values_only() -> None:
    config = ModelConfig.from_hf(keys_of("Qwen2ForCausalLM", num_key_value_heads=2))
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias) == (True, False, False)


def test_qwen3_has_query_and_key_norms_and_a_head_dim_of_its_own() -> None:
    config = ModelConfig.from_hf(keys_of("Qwen3ForCausalLM", num_key_value_heads=2))
    assert (config.has_qk_norm, config.head_dim, config.q_size, config.kv_size) == (
        True,
        128,
        512,
        256,
    )


def test_mistral_slides_in_every_layer_unless_the_window_is_null() -> None:
    keys = keys_of("MistralForCausalLM", num_key_value_heads=2)
    assert ModelConfig.from_hf(keys).windows == (4096,) * 4
    assert ModelConfig.from_hf({**keys, "sliding_window": None}).windows == (None,) * 4


def test_qwen2_slides_only_where_asked_from_max_window_layers_on() -> None:
    keys = keys_of("Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=8, max_window_layers=3)
    assert ModelConfig.from_hf(keys).windows == (None,) * 4
    assert ModelConfig.from_hf({**keys, "use_sliding_window": True}).windows == (
        None,
        None,
        None,
        8,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({}, None),
    ],
)
def test_the_declared_dtype_is_read_in_both_spellings(
    values: dict[str, Any], expected: str | None
) -> None:
    assert ModelConfig.from_hf(keys_of(**values)).dtype == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            keys_of("GPT2LMHeadModel"),
            "GPT2LMHeadModel; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2",
        ),
        ({}, "none named; supported"),
        (keys_of(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (keys_of(quantization_config={"quant_method": "gptq"}), "gptq"),
        (keys_of(hidden_size=None), "hidden_size is missing"),
        (keys_of(vocab_size=-1), "vocab_size must be a positive integer, is -1"),
        (keys_of(num_hidden_layers=10**30), "num_hidden_layers must be at most 4096, is 1000"),
        (keys_of(vocab_size=10**400), "vocab_size must be at most 2147483647"),
        (keys_of(rms_norm_eps=None), "rms_norm_eps must be a positive number, is None"),
        (keys_of(rms_norm_eps="x"), "rms_norm_eps must be a positive number, is 'x'"),
        (keys_of(rope_theta="x"), "rope_theta must be a positive number, is 'x'"),
        (keys_of(rope_theta=10**400), "rope_theta must be a positive number"),
        (keys_of(rope_scaling="x"), "rope_scaling must be an object, is 'x'"),
        (keys_of(rope_scaling={"type": "yarn", "beta_fast": "x"}), "beta_fast must be a pos"),
        ({"architectures": -1}, "architectures must be a list, is -1"),
        (keys_of(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
        (keys_of(head_dim=15), "head_dim must be even, is 15"),
        (keys_of(dtype="float8_e4m3fn"), "dtype float8_e4m3fn"),
        (
            keys_of(
                "Qwen3ForCausalLM",
                num_key_value_heads=2,
                use_sliding_window=True,
                layer_types=["chunked_attention"] * 4,
            ),
            "layer type 'chunked_attention'",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        ModelConfig.from_hf(keys)


def test_a_folder_without_a_readable_config_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "absent")
    with pytest.raises(StartupError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot read"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(StartupError, match="is not a JSON object"):
        ModelConfig.from_folder(tmp_path)
