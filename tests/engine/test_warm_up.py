"""The request that nobody waits for computes what real ones will, and leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import StepBatch, StepResult
from engine.engine import Engine
from engine.warm_up import warm_up
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, run_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.build(tmp_path_factory.mktemp("model"))


def warmed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """Tokens of each step, and what progress was told."""
    steps, told = [], []
    real = engine.runner.execute

    def execute(batch: StepBatch) -> StepResult:
        steps.append(batch.num_tokens)
        return real(batch)

    monkeypatch.setattr(engine.runner, "execute", execute)
    warm_up(engine, told.append)
    return steps, told


def test_it_computes_two_prompts_and_decodes_them_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warmed(make_engine(folder), monkeypatch)[0] == [64, 2, 2, 2]


def test_it_keeps_to_the_tokens_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, max_num_batched_tokens=50, max_num_seqs=2)
    assert max(warmed(engine, monkeypatch)[0]) == 50


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_model_len": 1},
        {"num_gpu_blocks_override": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
)
def test_every_block_is_free_afterwards_and_none_is_cached(
    folder: Path, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, **settings)
    warmed(engine, monkeypatch)
    assert engine.pool.stats().free == engine.pool.num_blocks
    assert engine.pool.drain_events() == ([], [])
    assert engine.scheduler.audit() == []


def test_answers_are_the_same_after_it(folder: Path) -> None:
    prompts = [make_prompt(40), make_prompt(70, 1)]
    cold, warm = make_engine(folder), make_engine(folder)
    warm_up(warm, lambda _: None)
    assert run_prompts(warm, prompts) == run_prompts(cold, prompts)


def test_logits_that_are_not_finite_end_it_with_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    engine.runner.decoder.weights.final_norm.fill_(float("nan"))
    steps, told = warmed(engine, monkeypatch)
    assert (steps, told[0]) == ([64], "warm-up: the model's logits are not finite")
    assert engine.pool.stats().free == engine.pool.num_blocks
