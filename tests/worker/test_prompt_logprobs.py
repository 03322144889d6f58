"""A prompt's own log-probabilities on their way from prefill to a router."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.v1 import types_pb2
from tests import tiny_models
from tests.engine.harness import make_prompt, reference_logprobs
from tests.worker.pair import pair

CHUNKS: dict[str, object] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def expected():  # type: ignore[no-untyped-def]
    model = tiny_models.random_model(tiny_models.VARIANTS["llama"])
    return lambda prompt: reference_logprobs(model, prompt)


def check(found: list[types_pb2.TokenLogprobs], prompt: list[int], expected: torch.Tensor) -> None:
    assert len(found) == len(prompt) - 1
    for token_id, logprobs, row in zip(prompt[1:], found, expected, strict=True):
        assert logprobs.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [top.logprob for top in logprobs.top] == pytest.approx(
            row.topk(2).values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("length", [1, 2, 64, 150])
async def test_they_come_in_pieces_before_the_first_token_of_any_choice(
    folder: Path, expected, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.first_tokens.PROMPT_TOKENS_PER_OUTPUT", 40)
    async with pair(folder, prefill=CHUNKS) as both:
        prompt = make_prompt(length)
        plain = await both.generate(prompt, "plain")
        results = await both.generate_choices(prompt, "scored", n=2, prompt_logprobs=2)
        check(results[0].prompt_logprobs, prompt, expected(prompt))
        assert results[1].prompt_logprobs == []
        assert [result.output for result in results] == [plain.output] * 2


async def test_the_prefix_cache_is_bypassed_and_filled(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(70)
        for name in ("first", "second"):
            scored = await both.generate(prompt, name, prompt_logprobs=2)
            check(scored.prompt_logprobs, prompt, expected(prompt))
            assert scored.cached_tokens == 0
        assert (await both.generate(prompt, "usual")).cached_tokens == 64


async def test_they_come_also_when_the_first_token_is_the_last(folder: Path, expected) -> None:
    async with pair(folder) as both:
        prompt = make_prompt(70)
        scored = await both.generate(prompt, "scored", max_tokens=1, prompt_logprobs=2)
        check(scored.prompt_logprobs, prompt, expected(prompt))
        assert scored.finish_reason == types_pb2.FINISH_REASON_LENGTH
