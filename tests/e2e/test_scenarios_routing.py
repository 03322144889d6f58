"""Where requests go when scores are equal, old, or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.prefix_credit import wait_credit
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import ROUTER_ARGS, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 40
LEAST_SHARE = 4
"""Of 40 requests over two workers; fewer by chance alone: once in 50,000,000 runs."""
NUM_PROMPTS = 80
"""Chance alone sends one worker's share of them all to one place once in 5,000,000,000 runs."""


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    quick = (*ROUTER_ARGS, "--load-max-age-s", "1.5")
    big = ("--dtype", "float32", "--num-gpu-blocks-override", "512")
    with fault_stack(
        tiny("llama"), num_prefill=2, num_decode=2, router_args=quick, worker_args=big
    ) as stack:
        yield stack


def shares(stack: FaultStack, first_seed: int) -> tuple[Counter[str], Counter[str]]:
    """How many of some new requests, one after the other, each worker gets."""
    prefills, decodes = Counter[str](), Counter[str]()
    for seed in range(first_seed, first_seed + NUM_REQUESTS):
        prompt = make_prompt(30, seed)
        answer = stack.ask(prompt, 4)
        assert answer.token_ids == stack.reference(prompt, 4)
        prefills[answer.route.prefill_worker] += 1
        decodes[answer.route.decode_worker] += 1
    return prefills, decodes


def test_equal_scores_spread_requests_over_all_workers(stack: FaultStack) -> None:
    prefills, decodes = shares(stack, first_seed=1000)
    assert min(prefills["prefill-0"], prefills["prefill-1"]) >= LEAST_SHARE
    assert min(decodes["decode-0"], decodes["decode-1"]) >= LEAST_SHARE
    stack.check_recovered()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_whose_reports_freeze_is_neither_shunned_nor_flooded(
    stack: FaultStack, name: str
) -> None:
    with stack.faults[name].rule("report", "drop") as report:
        report.wait(times=3)
        prefills, decodes = shares(stack, first_seed=2000 if name == "decode-0" else 3000)
    share = (prefills | decodes)[name]
    assert LEAST_SHARE <= share <= NUM_REQUESTS - LEAST_SHARE
    stack.check_recovered()


def test_a_cached_prefix_attracts_requests_but_does_not_hold_up_a_crowd(stack: FaultStack) -> None:
    prompt = make_prompt(200, seed=70)
    first = stack.ask(prompt, 4).route.prefill_worker
    # Asking again before would spread the prefix.
    wait_credit(stack.redis_url, prompt, first, 12)
    alone = [stack.ask([*prompt, 100 + index], 4).route for index in range(6)]
    assert {route.prefill_worker for route in alone} == {first}
    crowd = [stack.begin([*prompt, index], 60) for index in range(24)]
    assert all(
        answer.result().token_ids == stack.reference([*prompt, index], 60)
        for index, answer in enumerate(crowd)
    )
    routes = [answer.result().route for answer in crowd]
    assert {route.decode_worker for route in routes} == {"decode-0", "decode-1"}
    stack.check_recovered()


def test_a_restarted_worker_is_not_credited_with_its_former_cache(stack: FaultStack) -> None:
    prompts = [make_prompt(100, seed) for seed in range(100, 100 + NUM_PROMPTS)]
    homes = {}
    for index, prompt in enumerate(prompts):
        # An only token is not handed off: no decode worker has these prompts to give.
        homes[index] = stack.ask(prompt, 1).route.prefill_worker
    mine = [prompts[index] for index, home in homes.items() if home == "prefill-0"]
    others = [prompts[index] for index, home in homes.items() if home == "prefill-1"]
    assert eventually(lambda: stack.ask(others[0], 1).route.prefill_worker == "prefill-1")
    stack.workers["prefill-0"].kill()
    stack.restart("prefill-0")
    routes = [stack.ask(prompt, 1).route for prompt in mine]
    assert {route.cached_tokens for route in routes} == {0}
    assert {route.prefill_worker for route in routes} == {"prefill-0", "prefill-1"}
    # Who did not restart still is.
    again = [stack.ask(prompt, 1).route for prompt in others]
    assert {route.prefill_worker for route in again} == {"prefill-1"}
    stack.check_recovered()
