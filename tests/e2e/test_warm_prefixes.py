"""A prefill worker that starts takes over what another one is asked for again and again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prefix_credit import wait_credit
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

PREFIX_BLOCKS = 10


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    args = ("--dtype", "float32", "--num-gpu-blocks-override", "512")
    warm = ("--warm-prefix-share", "0.5")
    served = tiny("llama")
    with fault_stack(served, num_prefill=2, num_decode=1, worker_args=(*args, *warm)) as stack:
        yield stack


def make_hot(stack: FaultStack, seed: int) -> tuple[list[int], str, str]:
    """A prompt that one prefill worker has found in its cache; that worker, and the other one."""
    prompt = make_prompt(16 * PREFIX_BLOCKS + 1, seed)
    home = stack.ask(prompt, 1).route.prefill_worker
    wait_credit(stack.redis_url, prompt, home, PREFIX_BLOCKS)
    again = stack.ask(prompt, 1).route
    assert (again.prefill_worker, again.cached_tokens) == (home, 16 * PREFIX_BLOCKS)
    return prompt, home, "prefill-1" if home == "prefill-0" else "prefill-0"


def test_a_new_worker_has_a_hot_prompt_without_computing_it(stack: FaultStack) -> None:
    prompt, home, other = make_hot(stack, seed=1)
    stack.workers[other].kill()
    stack.restart(other)
    stack.workers[home].kill()
    answer = stack.ask(prompt, 4)
    assert answer.token_ids == stack.reference(prompt, 4)
    assert answer.route.prefill_worker == other
    assert answer.route.cached_tokens == 16 * PREFIX_BLOCKS
    log = stack.workers[other].log()
    assert log.index("warm-up:") < log.index("warmed num_blocks=10") < log.index("ready grpc=")
    stack.restart(home)
    stack.check_recovered()


def test_a_source_that_dies_under_the_read_keeps_nobody_from_ready(stack: FaultStack) -> None:
    prompt, home, other = make_hot(stack, seed=2)
    faults = stack.faults[other]
    former = faults._worker
    stack.workers[other].kill()
    stack.workers[other].start()
    assert eventually(lambda: faults._worker is not former)
    with faults.hold("pull:during") as reading:
        reading.wait()
        stack.workers[home].kill()
        stack.wait_usable(other)
    answer = stack.ask(prompt, 4)
    assert answer.token_ids == stack.reference(prompt, 4)
    assert answer.route.cached_tokens == 0
    stack.restart(home)
    stack.check_recovered()
