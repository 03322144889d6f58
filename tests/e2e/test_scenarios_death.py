"""Workers that are killed or stopped while they serve, and what becomes of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from bench.pods import Pod
from tests.engine.harness import make_prompt
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

NUM_OUTPUTS = 30
seeds = count()
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), num_prefill=2, num_decode=2) as stack:
        yield stack


def kill(pod: Pod) -> Callable[[FaultStack], None]:
    """Kills it; what brings it back."""
    pod.kill()
    return lambda stack: stack.restart(pod.name)


def stop(pod: Pod) -> Callable[[FaultStack], None]:
    """Stops it; what lets it go on."""
    pod.suspend()
    return lambda stack: pod.resume()


killed_and_stopped = pytest.mark.parametrize("end", [kill, stop])


def check_another_takes_over(
    stack: FaultStack,
    reached: tuple[str, str, int],
    victim: Callable[[str], str],
    end: Callable[[Pod], Callable[[FaultStack], None]],
) -> None:
    """At the point `reached` (role, point, times before) of a request, the victim ends."""
    prompt = make_prompt(200, seed=next(seeds))
    role, point, skip = reached
    with stack.hold_any(role, point, skip) as fault:
        answer = stack.begin(prompt, NUM_OUTPUTS)
        name = victim(fault.wait())
        bring_back = end(stack.workers[name])
    completion = answer.result()
    assert completion.token_ids == stack.reference(prompt, NUM_OUTPUTS)
    assert name not in (completion.route.prefill_worker, completion.route.decode_worker)
    bring_back(stack)
    stack.check_recovered()


@killed_and_stopped
@pytest.mark.parametrize(
    ("role", "point"),
    [
        pytest.param("prefill", "queued", marks=slow),
        pytest.param("prefill", "Grant:before", marks=slow),
        pytest.param("prefill", "Grant:after", marks=slow),
        pytest.param("prefill", "step", marks=slow),
        pytest.param("prefill", "Announce:before", marks=slow),
        ("decode", "pull:before"),
        ("decode", "pull:during"),
        ("decode", "pull:after"),
    ],
)
def test_when_prefill_ends_before_the_hand_off_is_over_another_one_takes_over(
    stack: FaultStack, role: str, point: str, end: Callable[[Pod], Callable[[FaultStack], None]]
) -> None:
    def victim(holder: str) -> str:
        return holder if role == "prefill" else stack.exporter()

    check_another_takes_over(stack, (role, point, 0), victim, end)


@killed_and_stopped
@pytest.mark.parametrize(
    ("point", "skip"),
    [
        ("pull:before", 0),
        pytest.param("pull:during", 0, marks=slow),
        pytest.param("pull:after", 0, marks=slow),
        pytest.param("Release:after", 0, marks=slow),
        pytest.param("step", 0, marks=slow),
        ("step", 12),
    ],
)
def test_when_decode_ends_the_stream_goes_on_elsewhere(
    stack: FaultStack, point: str, skip: int, end: Callable[[Pod], Callable[[FaultStack], None]]
) -> None:
    check_another_takes_over(stack, ("decode", point, skip), lambda holder: holder, end)
