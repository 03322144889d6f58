"""Log-probabilities of a prompt's own tokens against transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Logprobs
from engine.engine import Engine
from engine.sequence import Sequence
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, make_sequence, reference_logprobs, run

NUM_TOP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def expected():  # type: ignore[no-untyped-def]
    model = tiny_models.random_model(tiny_models.VARIANTS["llama"])
    return lambda prompt: reference_logprobs(model, prompt)


def scored(prompt: list[int], name: str = "scored") -> Sequence:
    sequence = make_sequence(prompt, 4, name)
    sequence.num_prompt_logprobs = NUM_TOP
    return sequence


def run_scored(engine: Engine, *sequences: Sequence) -> dict[str, list[Logprobs]]:
    found: dict[str, list[Logprobs]] = {}
    for sequence in sequences:
        engine.scheduler.add(sequence)
    while (batch := engine.scheduler.schedule()) is not None:
        for update in engine.scheduler.postprocess(batch, engine.runner.execute(batch)):
            found.setdefault(update.sequence.request_id, []).extend(update.prompt_logprobs)
    return found


def check(found: list[Logprobs], prompt: list[int], expected: torch.Tensor) -> None:
    assert len(found) == len(prompt) - 1
    for token_id, logprobs, row in zip(prompt[1:], found, expected, strict=True):
        assert logprobs.chosen == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [p for _, p in logprobs.top] == pytest.approx(
            row.topk(NUM_TOP).values.tolist(), abs=1e-4
        )
        for top_id, logprob in logprobs.top:
            assert logprob == pytest.approx(float(row[top_id]), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("max_slice_logits", [1 << 24, 5 * tiny_models.VOCAB_SIZE])
def test_they_equal_those_of_transformers_across_chunks_and_slices(
    folder: Path, expected, length: int, max_slice_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prompt_logprobs._MAX_SLICE_LOGITS", max_slice_logits)
    engine = make_engine(folder, max_num_batched_tokens=32, max_num_seqs=8)
    prompt = make_prompt(length)
    found = run_scored(engine, scored(prompt))["scored"]
    check(found, prompt, expected(prompt))


def test_they_are_computed_whole_whatever_the_cache_holds_and_fill_it(
    folder: Path, expected
) -> None:
    engine = make_engine(folder)
    prompt = make_prompt(50)
    for name in ("first", "second"):
        sequence = scored(prompt, name)
        check(run_scored(engine, sequence)[name], prompt, expected(prompt))
        assert sequence.num_cached_tokens == 0
    usual = make_sequence(prompt, 4, "usual")
    run(engine, [usual])
    assert usual.num_cached_tokens == 48


def test_others_in_the_batch_get_none_and_the_same_tokens(folder: Path, expected) -> None:
    engine = make_engine(folder)
    prompts = [make_prompt(40, seed) for seed in range(3)]
    alone = run(make_engine(folder), [make_sequence(p, 4, str(i)) for i, p in enumerate(prompts)])
    others = [make_sequence(prompts[index], 4, str(index)) for index in (0, 2)]
    mixed = [others[0], scored(prompts[1]), others[1]]
    found = run_scored(engine, *mixed)
    assert [sequence.output_token_ids for sequence in mixed] == alone
    check(found["scored"], prompts[1], expected(prompts[1]))
    assert found["0"] == found["2"] == []
