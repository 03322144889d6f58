"""One worker of each role, so that there is no other one to take over."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from core.errors import DeadlineExceeded, Unavailable
from tests.engine.harness import make_prompt
from tests.faults.stack import ROUTER_ARGS, SILENCE_S, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

WORKERS = ["prefill-0", "decode-0"]
WAIT_S = 2.0
SLACK_S = 30.0
"""For a busy machine."""


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    patient = (*ROUTER_ARGS, "--worker-wait-s", "120")
    with fault_stack(tiny("llama"), router_args=patient) as stack:
        yield stack


@pytest.mark.parametrize("name", WORKERS)
def test_a_request_waits_for_its_worker_to_be_started_again(stack: FaultStack, name: str) -> None:
    prompt = make_prompt(100, seed=len(name))
    with stack.faults["decode-0"].hold("pull:during") as reading:
        answer = stack.begin(prompt, 30)
        reading.wait()
        stack.workers[name].kill()
    stack.restart(name)
    assert answer.result().token_ids == stack.reference(prompt, 30)
    stack.check_recovered()


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_that_restarts_at_its_address_is_met_anew(stack: FaultStack, name: str) -> None:
    prompts = [make_prompt(64 + index, seed=len(name)) for index in range(6)]
    for prompt in prompts:
        stack.ask(prompt, 10)
    stack.workers[name].kill()
    stack.restart(name)
    for prompt in reversed(prompts):
        # Other blocks than before, at addresses that nobody has told the peer yet.
        answer = stack.ask(prompt, 10)
        assert answer.token_ids == stack.reference(prompt, 10)
        assert answer.route.attempts == 1
    stack.check_recovered()


@pytest.mark.parametrize("name", WORKERS)
def test_a_request_waits_for_its_worker_to_go_on(stack: FaultStack, name: str) -> None:
    prompt = make_prompt(110, seed=len(name))
    with stack.faults["decode-0"].hold("pull:during") as reading:
        answer = stack.begin(prompt, 30)
        reading.wait()
        stack.workers[name].suspend()
    time.sleep(SILENCE_S + 1)
    stack.workers[name].resume()
    assert answer.result().token_ids == stack.reference(prompt, 30)
    stack.check_recovered()


def test_a_workers_restart_does_not_make_a_deadline_longer(stack: FaultStack) -> None:
    stack.workers["decode-0"].kill()
    began_at = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        stack.ask(make_prompt(30), 10, timeout_s=1.0)
    assert time.monotonic() - began_at < 1.0 + SLACK_S
    stack.restart("decode-0")
    stack.check_recovered()


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("prefill-0", "kill"),
        ("decode-0", "suspend"),
        pytest.param("prefill-0", "suspend", marks=pytest.mark.slow),
        pytest.param("decode-0", "kill", marks=pytest.mark.slow),
    ],
)
def test_without_a_worker_of_a_role_a_clear_error_comes_in_bounded_time(
    stack: FaultStack, name: str, signal: str
) -> None:
    stack.restart_router("--worker-wait-s", str(WAIT_S))
    worker = stack.workers[name]
    with stack.faults["decode-0"].hold("pull:during") as reading:
        running = stack.begin(make_prompt(120), 30)
        reading.wait()
        getattr(worker, signal)()
    began_at = time.monotonic()
    new = stack.begin(make_prompt(121), 30)
    role = name.partition("-")[0]
    for answer in (running, new):
        with pytest.raises(Unavailable, match=f"no {role} worker is ready"):
            answer.result()
    assert time.monotonic() - began_at < SILENCE_S + WAIT_S + SLACK_S
    if signal == "kill":
        stack.restart(name)
    else:
        worker.resume()
        stack.wait_usable(name)
    stack.check_recovered()
