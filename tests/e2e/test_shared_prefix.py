"""A system prompt that many requests begin with, through a whole stack of two workers a role."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.prefix_credit import wait_credit
from tests.e2e.stack import RunningStack, running_stack
from tests.engine.harness import make_prompt

pytestmark = pytest.mark.e2e

NUM_SHARED = 1500
NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def stack(smollm2: Path) -> Iterator[RunningStack]:
    with running_stack(smollm2, "--dtype", "float32", "--prefill", "2", "--decode", "2") as running:
        yield running


def test_a_shared_system_prompt_is_computed_once_for_20_requests(stack: RunningStack) -> None:
    system = make_prompt(NUM_SHARED, seed=1)
    prompts = [[*system, *make_prompt(20, seed=seed)] for seed in range(NUM_REQUESTS)]
    first = stack.greedy(prompts[0], 4)
    assert first.route.cached_tokens == 0
    wait_credit(stack.redis_url, system, first.route.prefill_worker, NUM_SHARED // 16)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        others = list(pool.map(lambda prompt: stack.greedy(prompt, 4), prompts[1:]))
    held = NUM_SHARED // 16 * 16
    assert [answer.route.cached_tokens for answer in others] == [held] * (NUM_REQUESTS - 1)
    stack.wait_until_idle()
