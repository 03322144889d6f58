"""Checkpoints in every supported format: logits and tokens of the model that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bench.quantized_checkpoints import (
    GptqOptions,
    Recipe,
    awq,
    compressed,
    fp8,
    gptq,
    packed,
    write_quantized,
)
from core.errors import StartupError
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, reference_tokens, run_prompts
from tests.engine.kernels import native_library
from tests.engine.logits import logits_of, reference_logits

PROMPTS = [make_prompt(length) for length in (1, 17, 40)]
RECIPES: dict[str, Recipe] = {
    "awq": awq(group_size=32),
    "gptq": gptq(GptqOptions(group_size=32)),
    "gptq, version 2": gptq(GptqOptions(group_size=32, version="gptq_v2")),
    "gptq, order shared": gptq(GptqOptions(group_size=32, order="shared")),
    "gptq, order of each its own": gptq(GptqOptions(group_size=32, order="own")),
    "gptq, 8 bits": gptq(GptqOptions(num_bits=8, group_size=32)),
    "gptq, 8 bits, symmetric": gptq(GptqOptions(num_bits=8, group_size=-1, is_symmetric=True)),
    "gptq, symmetric": gptq(GptqOptions(group_size=32, is_symmetric=True)),
    "fp8": fp8(),
    "fp8 in blocks": fp8(block=(24, 40)),
    "compressed fp8": compressed("float"),
    "compressed int8": compressed("int"),
    "compressed int4": packed(group_size=32),
    "compressed int4, zero points": packed(group_size=32, is_symmetric=False),
    "compressed int4, order of each its own": packed(group_size=32, has_order=True),
    "packed int8": packed(num_bits=8, group_size=32, is_symmetric=False, has_order=True),
}
MIXED = ("lm_head", "layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
"""One that is fused with quantized ones, and one that is not."""


MIXED_RECIPES = ["awq", "gptq, order of each its own", "fp8 in blocks", "compressed int4"]


def write(
    folder: Path, recipe: Recipe, left_alone: tuple[str, ...] = ("lm_head",)
) -> transformers.PreTrainedModel:
    """A quantized checkpoint in `folder`, and the model that it stands for, of transformers."""
    source = tiny_models.build(folder / "source", "llama-biases")
    weights = write_quantized(source, folder / "quantized", recipe, left_alone)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.load_state_dict(weights)
    return model


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        native_library(torch.float32)
    return str(request.param)


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_gives_the_tokens_of_the_model_that_it_stands_for(
    name: str, kernels: str, tmp_path: Path
) -> None:
    model = write(tmp_path, RECIPES[name])
    engine = make_engine(tmp_path / "quantized", cpu_kernels=kernels)
    expected = [reference_tokens(model, prompt) for prompt in PROMPTS]
    assert run_prompts(engine, PROMPTS) == expected


@pytest.mark.parametrize("name", MIXED_RECIPES)
def test_modules_that_are_not_quantized_stay_so(name: str, kernels: str, tmp_path: Path) -> None:
    model = write(tmp_path, RECIPES[name], MIXED)
    engine = make_engine(tmp_path / "quantized", cpu_kernels=kernels)
    expected = [reference_tokens(model, prompt) for prompt in PROMPTS]
    assert run_prompts(engine, PROMPTS) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_logits_are_those_of_the_model_that_it_stands_for(
    name: str, kernels: str, tmp_path: Path
) -> None:
    expected = reference_logits(write(tmp_path, RECIPES[name]))
    logits = logits_of(tmp_path / "quantized", kernels, torch.float32)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "own_name", "change", "message"),
    [
        ("awq", "scales", None, "1 tensors are missing, first .*q_proj.scales"),
        ("awq", "qzeros", torch.ones(2, 2), r"q_proj: qzeros has shape \[2, 2\], .* \[2, 8\]"),
        ("awq", "qweight", torch.ones(64, 8), r"q_proj: packed integers are torch.float32"),
        ("gptq", "g_idx", torch.zeros(64).int(), "q_proj: g_idx has groups .* not of 32 inputs"),
        ("gptq", "bits", torch.ones(1), "unexpected tensor .*q_proj.bits"),
        ("fp8", "weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn), "not numbers"),
        ("fp8", "weight", torch.ones(64, 64), "weight has dtype torch.float32, not float8"),
        ("compressed int4", "weight_shape", torch.tensor([64, 8]), r"weight_shape is \[64, 8\]"),
        ("compressed int4", "weight_scale", torch.ones(64, 1), r"\[64, 1\], .* asks for \[64, 2\]"),
        (
            "compressed int4",
            "weight_packed",
            torch.ones(64, 8),
            "packed integers are torch.float32",
        ),
        ("compressed int4", "weight_zero_point", torch.ones(8, 2), "unexpected tensor .*_point"),
        ("compressed int4, zero points", "weight_zero_point", None, "1 tensors are missing"),
        (
            "compressed int4, zero points",
            "weight_zero_point",
            torch.ones(64, 2).int(),
            r"weight_zero_point has shape \[64, 2\], .* asks for \[8, 2\]",
        ),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(3, 3), r"\[3, 3\], .* asks for \[3, 2\]"),
    ],
)
def test_a_wrong_tensor_is_named(
    recipe: str, own_name: str, change: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, RECIPES[recipe])
    path = tmp_path / "quantized" / "model.safetensors"
    tensors, name = load_file(path), f"model.layers.1.self_attn.q_proj.{own_name}"
    tensors.pop(name, None)
    save_file(tensors | ({} if change is None else {name: change}), path)
    with pytest.raises(StartupError, match=message):
        make_engine(tmp_path / "quantized")


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    source = tiny_models.build(tmp_path / "source")
    write_quantized(source, tmp_path / "quantized", RECIPES["gptq"])
    path = tmp_path / "quantized" / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.self_attn.o_proj.bias"
    save_file(tensors | {name: torch.zeros(64)}, path)
    make_engine(tmp_path / "quantized")
    save_file(tensors | {name: torch.ones(64)}, path)
    with pytest.raises(StartupError, match="o_proj: bias is not zero"):
        make_engine(tmp_path / "quantized")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path, RECIPES["awq"])
    with pytest.raises(StartupError, match="quantization int8: the model's weights are quantized"):
        make_engine(tmp_path / "quantized", quantization="int8")
