"""Request ids that come twice, and messages of attempts that are over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client import BatonClient, CompletionStream
from core.errors import AlreadyExists, Unavailable
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), num_prefill=2) as stack:
        yield stack


def test_a_client_that_left_may_ask_again_under_the_same_id(stack: FaultStack) -> None:
    prompt = make_prompt(90)
    with stack.hold_any("decode", "pull:during") as fault:
        with stack.client() as client:
            options = {"token_ids": prompt, "max_tokens": 20, "request_id": "again"}
            with client.stream(ignore_eos=True, temperature=0.0, **options):
                fault.wait()
        answer = stack.begin(prompt, 20, request_id="again")
        assert answer.result().token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def joined(client: BatonClient, prompt: list[int], request_id: str) -> CompletionStream:
    """A call for a request that decode holds up: what it gets already is of another call's."""
    stream = client.stream(
        token_ids=prompt,
        max_tokens=20,
        request_id=request_id,
        temperature=0.0,
        ignore_eos=True,
        timeout_s=120.0,
    )
    next(stream)
    return stream


def test_two_clients_with_one_id_and_the_same_question_share_one_answer(stack: FaultStack) -> None:
    prompt = make_prompt(91)
    with stack.client() as client:
        with stack.hold_any("decode", "step", skip=5) as fault:
            first = stack.begin(prompt, 20, request_id="shared")
            fault.wait()
            stream = joined(client, prompt, "shared")
        second = stream.completion()
    assert first.result().token_ids == second.token_ids == stack.reference(prompt, 20)
    assert first.result().timing == second.timing
    stack.check_recovered()


def test_when_one_of_two_clients_with_one_id_leaves_the_other_still_gets_everything(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(92)
    with stack.client() as client:
        with stack.hold_any("decode", "step", skip=5) as fault:
            options = {"token_ids": prompt, "max_tokens": 20, "request_id": "left"}
            with client.stream(ignore_eos=True, temperature=0.0, timeout_s=120.0, **options):
                fault.wait()
                other = joined(client, prompt, "left")
        assert other.completion().token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_two_clients_with_one_id_and_other_questions_do_not_get_each_others_answer(
    stack: FaultStack,
) -> None:
    prompt, other = make_prompt(93), make_prompt(94)
    with stack.hold_any("decode", "step", skip=5) as fault:
        answer = stack.begin(prompt, 20, request_id="taken")
        fault.wait()
        with pytest.raises(AlreadyExists):
            stack.ask(other, 20, request_id="taken")
    assert answer.result().token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_a_failed_request_may_be_asked_again_under_the_same_id(stack: FaultStack) -> None:
    prompt = make_prompt(95)
    with stack.faults["decode-0"].rule("pull:before", "fail"), pytest.raises(Unavailable):
        stack.ask(prompt, 20, request_id="retried")
    answer = stack.ask(prompt, 20, request_id="retried")
    assert answer.token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_an_announcement_of_an_old_attempt_that_comes_after_the_new_one_began_changes_nothing(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(96)
    with stack.hold_any("prefill", "Announce:before") as announcing:
        answer = stack.begin(prompt, 20)
        name = announcing.wait()
        # The router takes it for dead and lets the other one prefill; decode is slow then.
        stack.workers[name].suspend()
        with stack.faults["decode-0"].hold("step", skip=5) as running:
            running.wait()
            stack.workers[name].resume()
            announcing.faults[name].go()
            assert not eventually(answer.done, timeout_s=0.5)
    assert answer.result().token_ids == stack.reference(prompt, 20)
    assert answer.result().route.attempts == 2
    assert answer.result().route.prefill_worker != name
    stack.check_recovered()


def test_a_read_of_an_old_attempt_that_ends_after_the_new_one_began_changes_nothing(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(97)
    with stack.faults["decode-0"].hold("pull:during") as reading:
        answer = stack.begin(prompt, 20)
        reading.wait()
        name = stack.exporter()
        stack.workers[name].suspend()
        assert answer.result().token_ids == stack.reference(prompt, 20)
        assert answer.result().route.attempts == 2
        stack.workers[name].resume()
    stack.check_recovered()
