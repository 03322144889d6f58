"""`--quantization`: what it computes, what it leaves alone, and how far logits move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from bench.prompt_logits import CPU, divergence
from bench.quantized_checkpoints import (
    GptqOptions,
    Recipe,
    awq,
    compressed,
    fp8,
    gptq,
    write_quantized,
)
from engine.engine import EngineConfig, load_engine
from engine.matrices import MatrixStorage
from engine.model_config import ModelConfig
from engine.quantization.weight import Code
from engine.weights import load_weights
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, run_prompts
from tests.engine.kernels import native_library
from tests.engine.logits import logits_of, reference_logits

SCHEMES = {"int8": Code.INT8, "fp8": Code.FP8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_library(torch.float32)
    return tiny_models.build(tmp_path_factory.mktemp("models") / "plain", "qwen3")


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(("name", "type_"), [("int8", "int"), ("fp8", "float")])
def test_it_computes_what_a_checkpoint_with_a_scale_for_each_output_does(
    name: str, type_: str, kernels: str, folder: Path, tmp_path: Path
) -> None:
    weights = write_quantized(folder, tmp_path / "quantized", compressed(type_))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights)
    logits = logits_of(folder, kernels, torch.float32, SCHEMES[name])
    torch.testing.assert_close(logits, reference_logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernels", "num_lines"), [("native", 0), ("torch", 1)])
def test_an_engine_tells_when_codes_save_no_memory(
    kernels: str, num_lines: int, folder: Path
) -> None:
    lines: list[str] = []
    config = EngineConfig(
        model=folder, quantization="int8", cpu_kernels=kernels, num_gpu_blocks_override=4
    )
    load_engine(config, lines.append)
    assert len([line for line in lines if "are written out" in line]) == num_lines


@pytest.mark.parametrize("name", SCHEMES)
def test_an_engine_gives_the_same_tokens_with_codes_and_with_what_they_stand_for(
    name: str, folder: Path
) -> None:
    prompts = [make_prompt(length) for length in (1, 17, 40)]
    native, plain = (
        run_prompts(make_engine(folder, quantization=name, cpu_kernels=kernels), prompts)
        for kernels in ("native", "torch")
    )
    assert native == plain
    assert native != run_prompts(make_engine(folder), prompts)


def test_the_output_matrix_and_embeddings_stay_as_they_are(folder: Path) -> None:
    config, plain = ModelConfig.from_folder(folder), MatrixStorage(torch.float32)
    storage = MatrixStorage(torch.float32, scheme=Code.FP8)
    own, expected = (load_weights(folder, config, kept, CPU, print) for kept in (storage, plain))
    assert torch.equal(own.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(own.embedding, expected.embedding)
    assert not torch.equal(own.layers[0].down.weight, expected.layers[0].down.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bound"), [("int8", 0.003), ("fp8", 0.04)])
def test_logits_stay_near_those_of_the_whole_model(
    name: str, bound: float, dtype: torch.dtype, folder: Path
) -> None:
    exact = logits_of(folder, "reference", torch.float32)
    assert divergence(logits_of(folder, "native", dtype, SCHEMES[name]), exact) <= bound


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        (awq(group_size=32), 0.3),
        (gptq(GptqOptions(group_size=32)), 0.3),
        (gptq(GptqOptions(num_bits=8, group_size=32)), 0.002),
        (fp8(), 0.04),
        (fp8(block=(32, 32)), 0.04),
    ],
)
def test_a_quantized_checkpoint_stays_near_the_model_that_it_was_made_of(
    recipe: Recipe, bound: float, folder: Path, tmp_path: Path
) -> None:
    exact = logits_of(folder, "reference", torch.float32)
    write_quantized(folder, tmp_path / "quantized", recipe)
    logits = logits_of(tmp_path / "quantized", "native", torch.bfloat16)
    assert divergence(logits, exact) <= bound
