"""Redis and the router die, and come back with less or older knowledge than they had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from core.errors import Unavailable
from tests.e2e.prefix_credit import REPORT_S, wait_credit
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

AFTER_LEASE_S = 6.0
"""The registry's lease is 5 s."""


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    big = ("--dtype", "float32", "--num-gpu-blocks-override", "512")
    with fault_stack(tiny("llama"), num_prefill=2, kv_transport="tcp", worker_args=big) as stack:
        yield stack


def restart_redis(stack: FaultStack) -> None:
    stack.redis.kill()
    stack.redis.start()
    stack.redis.wait_ready()


def test_requests_go_on_while_redis_is_dead_and_after_it_came_back_empty(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(200)
    home = stack.ask(prompt, 4).route.prefill_worker
    wait_credit(stack.redis_url, prompt, home, 12)
    with stack.faults["decode-0"].hold("step", skip=5) as running:
        answer = stack.begin(make_prompt(60, seed=3), 30)
        running.wait()
        stack.redis.kill()
    assert answer.result().token_ids == stack.reference(make_prompt(60, seed=3), 30)
    stack.check_right([(make_prompt(40, seed), 10) for seed in range(10)])
    time.sleep(AFTER_LEASE_S)
    stack.check_right([(make_prompt(50, seed), 10) for seed in range(10)])
    stack.redis.start()
    stack.redis.wait_ready()
    stack.check_recovered()
    wait_credit(stack.redis_url, prompt, home, 12)  # The index has healed.
    stack.check_recovered()


def test_a_redis_that_comes_back_with_old_contents_does_not_bring_back_former_lives(
    stack: FaultStack,
) -> None:
    # Of so many, chance alone sends one worker's share all to one place in no run.
    prompts = [make_prompt(64, seed) for seed in range(200, 280)]
    time.sleep(REPORT_S)
    # An only token is not handed off: no decode worker has these prompts to give.
    homes = [stack.ask(prompt, 1).route.prefill_worker for prompt in prompts]
    mine = [p for p, home in zip(prompts, homes, strict=True) if home == "prefill-0"]
    assert eventually(lambda: stack.ask(mine[0], 1).route.cached_tokens == 48)
    stack.redis.save_snapshot()
    stack.workers["prefill-0"].kill()
    stack.restart("prefill-0")
    restart_redis(stack)
    time.sleep(REPORT_S)
    answers = [stack.ask(prompt, 1) for prompt in mine]
    for prompt, answer in zip(mine, answers, strict=True):
        assert answer.token_ids == stack.reference(prompt, 1)
        assert (answer.route.attempts, answer.route.cached_tokens) == (1, 0)
    # With credit for its former cache, all would have gone there.
    assert {answer.route.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
    stack.redis.forget_snapshot()
    stack.check_recovered()


def test_a_worker_that_restarts_while_redis_is_away_is_used_once_it_is_back(
    stack: FaultStack,
) -> None:
    stack.redis.kill()
    stack.workers["prefill-0"].kill()
    stack.workers["prefill-0"].start()
    stack.workers["prefill-0"].wait_ready()
    stack.check_right([(make_prompt(55, seed), 10) for seed in range(10)])
    stack.redis.start()
    stack.redis.wait_ready()
    stack.wait_usable("prefill-0")
    stack.check_recovered()


@pytest.mark.parametrize(
    ("role", "point"),
    [
        ("prefill", "queued"),
        ("prefill", "Announce:before"),
        ("decode", "pull:during"),
        ("decode", "step"),
    ],
)
def test_when_the_router_is_killed_workers_free_what_its_requests_held(
    stack: FaultStack, role: str, point: str
) -> None:
    with stack.hold_any(role, point) as fault:
        answers = [stack.begin(make_prompt(70, seed), 40) for seed in range(6)]
        fault.wait()
        stack.router.kill()
    wait(answers)
    for answer in answers:
        assert isinstance(answer.exception(), Unavailable | None)
    stack.restart_router()
    stack.check_recovered()


@pytest.mark.slow
def test_when_the_router_is_stopped_workers_free_what_its_requests_held(stack: FaultStack) -> None:
    with stack.faults["decode-0"].hold("step", skip=5) as running:
        answer = stack.begin(make_prompt(80), 40, timeout_s=120.0)
        running.wait()
        stack.router.suspend()
    assert eventually(lambda: "router_left" in stack.workers["decode-0"].log(), timeout_s=60)
    stack.router.resume()
    assert answer.result().token_ids == stack.reference(make_prompt(80), 40)
    stack.check_recovered()
