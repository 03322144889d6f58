"""Processes that are told to leave while they serve: nothing is lost, and nothing leaks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from baton.v1 import types_pb2
from client import Completion
from core.errors import Cancelled, Unavailable
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import ROUTER_ARGS, WORKER_ARGS, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

DRAIN = ("--drain-timeout-s", "60")
"""Twice what a pod has to end: none of these tests waits for it."""
NUM_OUTPUTS = 60
INTERVAL_S = 0.2
"""Between requests of a steady load: five a second."""
seeds = itertools.count()


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(
        tiny("llama"),
        num_prefill=2,
        num_decode=2,
        worker_args=(*WORKER_ARGS, *DRAIN),
        # As often as routers look by default, and not as often as other tests have them.
        router_args=(*ROUTER_ARGS, *DRAIN, "--worker-poll-s", "1"),
    ) as stack:
        yield stack


class Load:
    """Requests that were begun, each to be checked against what it should have answered."""

    def __init__(self, stack: FaultStack) -> None:
        self._stack = stack
        self._begun: list[tuple[list[int], Future[Completion]]] = []

    def begin(self, count: int = 1) -> None:
        for _ in range(count):
            prompt = make_prompt(50, seed=next(seeds) % 8)
            self._begun.append((prompt, self._stack.begin(prompt, NUM_OUTPUTS)))

    def go_on_until(self, is_over) -> None:  # type: ignore[no-untyped-def]
        """One request each interval."""
        while not is_over():
            self.begin()
            time.sleep(INTERVAL_S)

    def check(self) -> None:
        """Nothing has failed, and every token is right."""
        for prompt, answer in self._begun:
            assert answer.result().token_ids == self._stack.reference(prompt, NUM_OUTPUTS)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_that_leaves_under_load_loses_nothing(stack: FaultStack, name: str) -> None:
    load = Load(stack)
    load.begin(12)
    time.sleep(0.1)
    leaving = stack._threads.submit(stack.workers[name].terminate)
    load.go_on_until(leaving.done)
    load.begin(4)
    load.check()
    assert leaving.result() == 0
    stack.restart(name)
    stack.check_recovered()


def test_decode_hands_over_what_it_cannot_finish_in_time(stack: FaultStack) -> None:
    prompt = make_prompt(60, seed=next(seeds))
    stack.workers["decode-1"].terminate()
    stack.workers["decode-0"].terminate()
    stack.workers["decode-0"].start("--drain-timeout-s", "2")
    stack.wait_usable("decode-0")
    with stack.faults["decode-0"].hold("step", skip=10) as fault:
        answer = stack.begin(prompt, NUM_OUTPUTS)
        fault.wait()
        stack.restart("decode-1")
        leaving = stack._threads.submit(stack.workers["decode-0"].terminate)
        completion = answer.result()
    assert completion.token_ids == stack.reference(prompt, NUM_OUTPUTS)
    assert (completion.route.decode_worker, completion.route.attempts) == ("decode-1", 2)
    assert leaving.result() == 0
    stack.restart("decode-0")
    stack.check_recovered()


def test_every_worker_can_be_replaced_under_a_steady_load(stack: FaultStack) -> None:
    load = Load(stack)

    def replace_all() -> None:
        for name, pod in stack.workers.items():
            assert pod.terminate() == 0
            stack.restart(name)

    replacing = stack._threads.submit(replace_all)
    load.go_on_until(replacing.done)
    replacing.result()
    load.check()
    stack.check_recovered()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_new_worker_is_used_soon_and_one_that_leaves_no_more(
    stack: FaultStack, role: str
) -> None:
    def used() -> str:
        route = stack.ask(make_prompt(50, seed=next(seeds)), 2).route
        return route.prefill_worker if role == "prefill" else route.decode_worker

    pod = stack.workers[f"{role}-1"]
    pod.terminate()
    assert {used() for _ in range(6)} == {f"{role}-0"}
    stack.restart(pod.name)
    # Chance among equals does not leave out one of two so often.
    assert any(used() == f"{role}-1" for _ in range(60))


def test_a_router_that_leaves_finishes_its_streams_and_takes_no_more(stack: FaultStack) -> None:
    prompt = make_prompt(50, seed=next(seeds))
    with stack.hold_any("decode", "step", 10) as fault:
        answer = stack.begin(prompt, NUM_OUTPUTS)
        fault.wait()
        leaving = stack._threads.submit(stack.router.terminate)
        assert eventually(lambda: is_refused(stack))
        assert not answer.done()
    assert answer.result().token_ids == stack.reference(prompt, NUM_OUTPUTS)
    assert leaving.result() == 0
    stack.restart_router()
    stack.check_recovered()


def test_a_second_signal_ends_a_worker_at_once(stack: FaultStack) -> None:
    with stack.hold_any("decode", "pull:during") as fault:
        answer = stack.begin(make_prompt(50, seed=next(seeds)), 4)
        fault.wait()
        name = stack.exporter()
        os.kill(stack.workers[name].pid, signal.SIGTERM)
        draining = types_pb2.WORKER_STATE_DRAINING
        assert eventually(lambda: stack.worker_status(name).state == draining)
        assert stack.workers[name].terminate() == 0
    answer.result()
    stack.restart(name)


def is_refused(stack: FaultStack) -> bool:
    try:
        with stack.client() as client:
            client.status()
    except (Unavailable, Cancelled):
        # The latter for a call that comes in the very moment, on a connection from before.
        return True
    return False
