"""Whole steps of the GPU path with matrices in codes, in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu_model import RunAgain
from bench.quantized_checkpoints import GptqOptions, Recipe, awq, fp8, gptq, write_quantized
from engine.attention.triton import TritonAttention, TritonSettings
from engine.engine import Engine
from engine.gpu_runner import make_gpu_runner
from engine.graphs import GraphMode, GraphOptions
from engine.matrices import MatrixStorage
from engine.quantization.schemes import SCHEMES
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import GraphModel
from engine.triton_linear import TritonQuantizer
from engine.weights import load_weights
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, run_prompts

PROMPTS = [make_prompt(length) for length in (3, 17)]
CPU = torch.device("cpu")


def run_on_triton(engine: Engine) -> list[list[int]]:
    """With the engine's model loaded anew as a GPU would."""
    config = engine.model_config
    scheme = SCHEMES.get(engine.config.quantization)
    storage = MatrixStorage(torch.float32, None, TritonQuantizer(has_fp8=False), scheme)
    weights = load_weights(engine.config.model, config, storage, CPU, print)
    assert weights.layers[0].down.weight is None
    attention = TritonAttention(engine.kv_cache, TritonSettings(config.num_heads, 8))
    model = GraphModel(TritonDecoder(config, weights), attention, 512)
    options = GraphOptions(GraphMode.FULL_DECODE_ONLY, (2,))
    object.__setattr__(engine, "runner", make_gpu_runner(model, options, 2, RunAgain(), print))
    return run_prompts(engine, PROMPTS, 3)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_gives_the_tokens_of_what_its_codes_stand_for(name: str, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)

    def engine() -> Engine:
        return make_engine(folder, quantization=name, cpu_kernels="torch", max_num_seqs=2)

    assert run_on_triton(engine()) == run_prompts(engine(), PROMPTS, 3)


@pytest.mark.parametrize(
    "recipe",
    [awq(32), gptq(GptqOptions(group_size=16, order="shared")), fp8((32, 32))],
    ids=["awq", "gptq", "fp8"],
)
def test_a_checkpoint_gives_the_tokens_of_what_its_codes_stand_for(
    recipe: Recipe, tmp_path: Path
) -> None:
    source = tiny_models.build(tmp_path / "source", "llama-biases")
    write_quantized(source, tmp_path / "quantized", recipe)

    def engine() -> Engine:
        return make_engine(tmp_path / "quantized", cpu_kernels="torch", max_num_seqs=2)

    assert run_on_triton(engine()) == run_prompts(engine(), PROMPTS, 3)
