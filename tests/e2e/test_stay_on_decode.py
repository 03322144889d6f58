"""Requests that decode computes itself, through a whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.e2e.prefix_credit import wait_credit
from tests.e2e.stack import RunningStack, running_stack
from tests.engine.harness import make_prompt

pytestmark = pytest.mark.e2e

NUM_OUTPUTS = 20


@pytest.fixture(scope="module")
def model(tiny) -> tuple[Path, Reference]:  # type: ignore[no-untyped-def]
    return tiny("llama")


@pytest.fixture(scope="module")
def stack(model: tuple[Path, Reference]) -> Iterator[RunningStack]:
    roles = ("--prefill", "2", "--decode", "2")
    with running_stack(model[0], "--dtype", "float32", *roles, local_prefill=64) as running:
        yield running


def test_the_next_turns_of_a_conversation_transfer_nothing(
    stack: RunningStack, model: tuple[Path, Reference]
) -> None:
    reference = model[1]
    turn = make_prompt(200, seed=5)
    first = stack.greedy(turn, NUM_OUTPUTS)
    assert first.route.prefill_worker
    assert first.route.transferred_blocks == 13
    answer = first
    for number in range(3):
        held = (len(turn) + NUM_OUTPUTS - 1) // 16 * 16
        turn = [*turn, *answer.token_ids, *make_prompt(25, seed=number)]
        wait_credit(stack.redis_url, turn, first.route.decode_worker, held // 16)
        answer = stack.greedy(turn, NUM_OUTPUTS)
        assert answer.token_ids == reference(turn, NUM_OUTPUTS)
        assert answer.route.prefill_worker == ""
        assert answer.route.decode_worker == first.route.decode_worker
        assert (answer.route.transferred_blocks, answer.route.cached_tokens) == (0, held)
    stack.wait_until_idle()


def test_short_prompts_stay_and_long_ones_are_handed_off_at_the_same_time(
    stack: RunningStack, model: tuple[Path, Reference]
) -> None:
    reference = model[1]
    prompts = [make_prompt(length, seed) for seed in range(6) for length in (5, 30, 300)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: stack.greedy(prompt, NUM_OUTPUTS), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference(prompt, NUM_OUTPUTS)
        if len(prompt) == 300:
            assert answer.route.prefill_worker
    # Those that would have waited behind others on decode were handed off, too.
    assert any(not answer.route.prefill_worker for answer in answers)
    stack.wait_until_idle()
