"""The flagship: greedy tokens equal those of transformers' `generate`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests import tiny_models
from tests.engine.harness import (
    make_engine,
    make_prompt,
    make_sequence,
    reference_tokens,
    run,
    run_prompts,
)
from tests.engine.kernels import native_library

LENGTHS = (1, 15, 16, 17, 33, 100)
PROMPTS = [make_prompt(length) for length in LENGTHS]
Tokens = list[list[int]]


@pytest.fixture(scope="module", params=list(tiny_models.VARIANTS))
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tokens]:
    """A model folder and what transformers makes of PROMPTS with it."""
    torch.set_num_threads(1)
    folder = tiny_models.build(tmp_path_factory.mktemp("model"), request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return folder, [reference_tokens(model, prompt) for prompt in PROMPTS]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """A way for a CPU to compute, as EngineConfig.cpu_kernels names it."""
    if request.param == "native":
        native_library(torch.float32)
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether steps are planned ahead."""
    return bool(request.param)


def test_outputs_wander_so_that_equality_means_something(variant: tuple[Path, Tokens]) -> None:
    _, expected = variant
    assert all(len(set(tokens)) >= 5 for tokens in expected)


def test_each_prompt_alone_gives_the_reference_tokens(variant: tuple[Path, Tokens]) -> None:
    folder, expected = variant
    engine = make_engine(folder)
    assert [run_prompts(engine, [prompt])[0] for prompt in PROMPTS] == expected


def test_a_mixed_batch_gives_the_reference_tokens(
    variant: tuple[Path, Tokens], kernels: str, is_async: bool
) -> None:
    folder, expected = variant
    engine = make_engine(folder, cpu_kernels=kernels)
    assert run_prompts(engine, PROMPTS, is_async=is_async) == expected


def test_chunks_of_a_prompt_give_the_reference_tokens(
    variant: tuple[Path, Tokens], kernels: str, is_async: bool
) -> None:
    folder, expected = variant
    engine = make_engine(folder, cpu_kernels=kernels, max_num_batched_tokens=13, max_num_seqs=13)
    assert run_prompts(engine, PROMPTS, is_async=is_async) == expected


def test_a_cached_prefix_gives_the_reference_tokens(variant: tuple[Path, Tokens]) -> None:
    folder, expected = variant
    engine = make_engine(folder)
    run_prompts(engine, PROMPTS)
    assert run_prompts(engine, PROMPTS) == expected
    assert engine.pool.stats().cached > 0


def test_preemption_in_a_tiny_pool_gives_the_reference_tokens(
    variant: tuple[Path, Tokens], is_async: bool
) -> None:
    folder, expected = variant
    engine = make_engine(folder, num_gpu_blocks_override=8, block_size=8, max_model_len=64)
    sequences = [make_sequence(prompt, name=str(len(prompt))) for prompt in PROMPTS[:5]]
    assert run(engine, sequences, is_async=is_async) == expected[:5]
    assert sum(sequence.num_preemptions for sequence in sequences) > 0


def test_blocks_full_of_nan_from_an_earlier_use_change_nothing(
    variant: tuple[Path, Tokens],
) -> None:
    folder, expected = variant
    engine = make_engine(folder)
    engine.kv_cache.data.fill_(float("nan"))
    assert run_prompts(engine, PROMPTS) == expected


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_steps_padded_to_the_sizes_of_graphs_give_the_reference_tokens(
    variant: tuple[Path, Tokens], mode: str, is_async: bool
) -> None:
    folder, expected = variant
    engine = make_engine(folder, graph_mode=mode, capture_sizes=(4, 5, 16, 300))
    assert run_prompts(engine, PROMPTS, is_async=is_async) == expected
