"""Pools that are too small for everybody at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

SMALL = (
    *("--dtype", "float32", "--num-gpu-blocks-override", "24"),
    *("--max-num-batched-tokens", "64", "--max-recompute-tokens", "64"),
)


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), worker_args=SMALL) as stack:
        yield stack


def test_chunked_prefill_a_full_decode_pool_and_many_waiting_requests_do_not_lock_up(
    stack: FaultStack,
) -> None:
    lengths = [10 + 35 * (index % 8) for index in range(48)]
    requests = [
        (make_prompt(length, seed=index % 12), 20 + 10 * (index % 4))
        for index, length in enumerate(lengths)
    ]
    stack.check_right(requests)
    stack.check_recovered()


def test_long_sequences_that_decode_evicts_go_on_with_the_right_tokens(stack: FaultStack) -> None:
    requests = [(make_prompt(70, seed), 120) for seed in range(6)]
    with stack.faults["decode-0"].hold("step"):
        answers = [stack.begin(prompt, num_outputs) for prompt, num_outputs in requests]
        # However late they come, these run together.
        assert eventually(lambda: stack.worker_status("decode-0").load.running >= 3)
    attempts = []
    for (prompt, num_outputs), answer in zip(requests, answers, strict=True):
        assert answer.result().token_ids == stack.reference(prompt, num_outputs)
        attempts.append(answer.result().route.attempts)
    # Two fit, six want in: some come back through prefill, none of them again and again.
    assert max(attempts) > 1
    assert sum(attempts) < 30
    stack.check_recovered()


def test_short_sequences_that_decode_evicts_go_on_with_the_right_tokens(stack: FaultStack) -> None:
    stack.check_right([(make_prompt(12, seed), 50) for seed in range(24)])
    stack.check_recovered()


def test_a_sequence_that_fills_a_whole_pool_gets_through_among_others(stack: FaultStack) -> None:
    whole = (make_prompt(300), 84)
    stack.check_right([(make_prompt(40, seed), 40) for seed in range(8)] + [whole, whole])
    stack.check_recovered()


def test_blocks_evicted_from_prefills_cache_between_announcing_and_reading_are_not_missed(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(100, seed=50)
    with stack.faults["decode-0"].hold("pull:before") as reading:
        answer = stack.begin(prompt, 20)
        reading.wait()
        # Prompts that fill the rest of prefill's pool several times over.
        stack.check_right([(make_prompt(120, seed), 1) for seed in range(12)])
    assert answer.result().token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_a_prefix_that_only_prefill_has_cached_is_moved_whole(stack: FaultStack) -> None:
    prompt = make_prompt(160, seed=60)
    stack.ask(prompt, 5)
    stack.workers["decode-0"].kill()
    stack.restart("decode-0")
    again = stack.ask(prompt, 5)
    assert again.token_ids == stack.reference(prompt, 5)
    assert again.route.cached_tokens >= 144
    assert again.route.transferred_blocks == 10
    stack.check_recovered()


def test_a_prefix_that_only_decode_has_cached_is_fetched_and_not_moved_back(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(160, seed=61)
    stack.ask(prompt, 5)
    stack.workers["prefill-0"].kill()
    stack.restart("prefill-0")
    again = stack.ask(prompt, 5)
    assert again.token_ids == stack.reference(prompt, 5)
    assert (again.route.cached_tokens, again.route.transferred_blocks) == (144, 0)
    stack.check_recovered()
