"""Clients that leave, in every phase of a request."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from client import BatonClient
from core.errors import DeadlineExceeded
from tests.engine.harness import make_prompt
from tests.faults.control import Fault, eventually
from tests.faults.dispatcher import Dispatcher
from tests.faults.relay import relay
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 40
LEASE = ("--lease-s", "60")
"""Longer than any of these tests waits: nothing is freed because it has run out."""
PHASES = [
    ("prefill-0", "queued"),
    ("prefill-0", "Grant:before"),
    ("prefill-0", "step"),
    ("prefill-0", "Announce:before"),
    ("decode-0", "pull:before"),
    ("decode-0", "pull:during"),
    ("decode-0", "Release:before"),
    ("decode-0", "Release:after"),
    ("decode-0", "step"),
]
in_every_phase = pytest.mark.parametrize(("worker", "point"), PHASES)
FEW = [("prefill-0", "queued"), ("decode-0", "pull:during"), ("decode-0", "step")]
in_few_phases = pytest.mark.parametrize(
    ("worker", "point"),
    [pytest.param(*phase, marks=[] if phase in FEW else [pytest.mark.slow]) for phase in PHASES],
)
"""In every phase in `make test-all`, since each takes seconds."""
seeds = count()


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    small = ("--num-gpu-blocks-override", str(NUM_BLOCKS))
    with fault_stack(tiny("llama"), decode_args=small, prefill_args=(*small, *LEASE)) as stack:
        yield stack


def new_prompt() -> list[int]:
    """One that no cache helps."""
    return make_prompt(200, seed=1000 + next(seeds))


def start_and_leave(client: BatonClient, fault: Fault) -> None:
    """Starts a request and cancels it at the fault's point."""
    with client.stream(token_ids=new_prompt(), max_tokens=50, ignore_eos=True):
        fault.wait()


@in_every_phase
def test_a_cancel_in_any_phase_frees_everything(stack: FaultStack, worker: str, point: str) -> None:
    with stack.client() as client, stack.faults[worker].hold(point) as fault:
        start_and_leave(client, fault)
    stack.check_recovered()


@in_every_phase
def test_a_connection_reset_in_any_phase_frees_everything(
    stack: FaultStack, worker: str, point: str
) -> None:
    with relay(stack.address) as between, stack.faults[worker].hold(point) as fault:
        with BatonClient(between.address) as client:
            stream = client.stream(token_ids=new_prompt(), max_tokens=50, ignore_eos=True)
            fault.wait()
            between.reset()
            del stream
        assert eventually(lambda: num_requests(stack) == 0)
    stack.check_recovered()


@in_few_phases
def test_a_deadline_in_any_phase_frees_everything(
    stack: FaultStack, worker: str, point: str
) -> None:
    with stack.faults[worker].hold(point) as fault:
        answer = stack.begin(new_prompt(), 50, timeout_s=5.0)
        fault.wait()
        with pytest.raises(DeadlineExceeded):
            answer.result()
    stack.check_recovered()


@pytest.mark.parametrize("point", ["pull:before", "Release:before"])
def test_a_cancel_while_decode_waits_for_kv_frees_the_export_without_a_timeout(
    stack: FaultStack, point: str
) -> None:
    with stack.client() as client, stack.faults["decode-0"].hold(point) as fault:
        start_and_leave(client, fault)
        stack.check_idle()
    stack.check_recovered()


def test_a_cancel_in_the_middle_of_a_read_keeps_its_blocks_from_others_until_it_has_settled(
    stack: FaultStack,
) -> None:
    with stack.client() as client, stack.faults["decode-0"].hold("pull:during") as fault:
        start_and_leave(client, fault)
        assert eventually(lambda: num_quarantined(stack) == 13)
        # More than decode's other blocks hold at once, so each of those is used again.
        stack.check_right([(make_prompt(100, seed), 30) for seed in range(12)])
        assert num_quarantined(stack) == 13
    stack.check_recovered()


def test_a_cancel_while_queued_at_prefill_starts_no_work(stack: FaultStack) -> None:
    faults = stack.faults["prefill-0"]
    with stack.client() as client, faults.rule("step", "note") as step:
        with faults.hold("queued") as queued:
            start_and_leave(client, queued)
            stack.check_idle()
        stack.check_idle()
        assert step.num_reached == 0
    stack.check_recovered()


def test_cancels_of_finished_and_unknown_requests_and_twice_change_nothing(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(60)
    with Dispatcher(stack) as dispatcher, stack.faults["decode-0"].hold("step", skip=5) as running:
        other = stack.begin(prompt, 20)
        running.wait()
        dispatcher.abort("never-seen")
        dispatcher.abort("never-seen")
    assert other.result().token_ids == stack.reference(prompt, 20)
    with stack.client() as client:
        stream = client.stream(token_ids=prompt, max_tokens=20, request_id="finished")
        assert stream.completion().token_ids
        stream.close()
        stream.close()
    with Dispatcher(stack) as dispatcher:
        dispatcher.abort("finished")
    stack.check_recovered()


def num_quarantined(stack: FaultStack) -> int:
    return stack.worker_status("decode-0").load.blocks.quarantined


def num_requests(stack: FaultStack) -> int:
    with stack.client() as client:
        return client.status().router.num_requests
