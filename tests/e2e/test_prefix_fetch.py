"""Prefixes that move between workers instead of being computed again, with real processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from client import Completion
from tests.e2e.prefix_credit import wait_credit
from tests.engine.harness import make_prompt
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

PREFIX_BLOCKS = 10
MAX_CROWD = 60


@pytest.fixture(scope="module", params=["nixl", "tcp"])
def stack(tiny, request: pytest.FixtureRequest) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    args = ("--dtype", "float32", "--num-gpu-blocks-override", "512")
    transport = ("--kv-transport", request.param)
    with fault_stack(
        tiny("llama"), num_prefill=2, num_decode=2, worker_args=(*args, *transport)
    ) as stack:
        yield stack


def compute_prefix(stack: FaultStack, seed: int) -> tuple[list[int], str, str]:
    """A prefix, the prefill worker that alone has it, and another one in a new life.

    That one has not measured yet how fast it computes, so that it takes its time to fetch.
    """
    prefix = make_prompt(16 * PREFIX_BLOCKS, seed)
    # An only token is not handed off.
    home = stack.ask(prefix, 1).route.prefill_worker
    other = "prefill-1" if home == "prefill-0" else "prefill-0"
    stack.workers[other].kill()
    stack.restart(other)
    wait_credit(stack.redis_url, prefix, home, PREFIX_BLOCKS)
    return prefix, home, other


def crowd(
    stack: FaultStack, prefix: list[int], is_enough: Callable[[list[Future[Completion]]], bool]
) -> list[tuple[list[int], Future[Completion]]]:
    """Requests with that prefix, more and more of them."""
    begun: list[tuple[list[int], Future[Completion]]] = []
    for seed in range(MAX_CROWD):
        prompt = [*prefix, *make_prompt(150, seed)]
        begun.append((prompt, stack.begin(prompt, 4)))
        time.sleep(0.3)
        if is_enough([answer for _, answer in begun]):
            return begun
    raise AssertionError("no request goes to the other worker")


def check_answers(stack: FaultStack, begun: list[tuple[list[int], Future[Completion]]]) -> None:
    for prompt, answer in begun:
        assert answer.result().token_ids == stack.reference(prompt, 4)
    stack.check_recovered()


def test_a_crowd_that_spreads_takes_its_prefix_along(stack: FaultStack) -> None:
    prefix, home, other = compute_prefix(stack, seed=1)
    with stack.faults[home].hold("step"):
        begun = crowd(stack, prefix, lambda answers: any(a.done() for a in answers))
        route = next(a.result().route for _, a in begun if a.done())
    assert route.prefill_worker == other
    assert route.cached_tokens == 16 * PREFIX_BLOCKS
    check_answers(stack, begun)


def test_a_source_that_dies_under_the_read_costs_no_answer(stack: FaultStack) -> None:
    prefix, home, other = compute_prefix(stack, seed=2)
    with stack.faults[home].hold("step"), stack.faults[other].hold("pull:during") as reading:
        begun = crowd(stack, prefix, lambda _: reading.num_reached > 0)
        stack.workers[home].kill()
    for prompt, answer in begun:
        assert answer.result().token_ids == stack.reference(prompt, 4)
    stack.restart(home)
    stack.check_recovered()


def test_what_only_a_decode_worker_holds_is_fetched_from_there(stack: FaultStack) -> None:
    prefix = make_prompt(16 * PREFIX_BLOCKS + 1, seed=3)
    answer = stack.ask(prefix, 40)
    for name in ("prefill-0", "prefill-1"):
        stack.workers[name].kill()
        stack.restart(name)
    prompt = [*prefix, *answer.token_ids, *make_prompt(20)]
    num_held = (len(prefix) + 39) // 16
    wait_credit(stack.redis_url, prompt, answer.route.decode_worker, num_held)
    again = stack.ask(prompt, 4)
    assert again.token_ids == stack.reference(prompt, 4)
    assert again.route.cached_tokens == 16 * num_held
    stack.check_recovered()
