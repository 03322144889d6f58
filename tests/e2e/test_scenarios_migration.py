"""Decode dies in mid-answer, and every property of the answer stays as it would have been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client import Completion
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

QUESTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, few likely tokens": {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "seeded penalties": {"temperature": 1.0, "seed": 9, "frequency_penalty": 1.0},
    "log-probabilities": {"logprobs": 3},
    "seeded log-probabilities": {"temperature": 1.0, "seed": 10, "logprobs": 2},
    "end token": {"ignore_eos": False},
    "end token after a minimum": {"ignore_eos": False, "min_tokens": 25},
}
NUM_OUTPUTS = 40
NUM_TOKENS_BEFORE = 12
"""Decode steps until it dies: in the middle of every answer."""


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), num_decode=2) as stack:
        yield stack


def questions(stack: FaultStack) -> list[tuple[list[int], dict[str, Any]]]:
    """Each option with a prompt of its own, and stop strings that come late in the answer."""
    asked = []
    for index, options in enumerate(QUESTIONS.values()):
        asked.append((make_prompt(40 + 7 * index, seed=9), options))
    for index in range(2):
        prompt = make_prompt(33 + index, seed=9)
        text = stack.ask(prompt, NUM_OUTPUTS).text
        asked.append((prompt, {"stop": [text[len(text) // 2 :][:4]]}))
    return asked


def is_same(one: Completion, other: Completion) -> bool:
    """Everything that a client sees of the answer, but for its way and its time."""
    return (
        one.token_ids == other.token_ids
        and one.text == other.text
        and one.finish_reason == other.finish_reason
        and one.usage == other.usage
        and len(one.logprobs) == len(other.logprobs)
        and all(
            a.logprob == pytest.approx(b.logprob, abs=1e-3)
            and [token for token, _ in a.top] == [token for token, _ in b.top]
            for a, b in zip(one.logprobs, other.logprobs, strict=True)
        )
    )


@pytest.mark.parametrize("signal", ["kill", "suspend"])
def test_an_answer_is_the_same_when_decode_ends_in_the_middle_of_it(
    stack: FaultStack, signal: str
) -> None:
    asked = questions(stack)
    undisturbed = [stack.ask(prompt, NUM_OUTPUTS, **options) for prompt, options in asked]
    with stack.hold_any("decode", "step", skip=NUM_TOKENS_BEFORE) as fault:
        answers = [stack.begin(prompt, NUM_OUTPUTS, **options) for prompt, options in asked]
        name = fault.wait()
        getattr(stack.workers[name], signal)()
    completions = [answer.result() for answer in answers]
    for (_, options), before, after in zip(asked, undisturbed, completions, strict=True):
        assert is_same(before, after), f"{options}: {before} {after}"
    assert any(completion.route.attempts > 1 for completion in completions)
    if signal == "kill":
        stack.restart(name)
    else:
        stack.workers[name].resume()
        stack.wait_usable(name)
    stack.check_recovered()


def test_a_stream_shows_each_token_once_when_decode_dies_twice(stack: FaultStack) -> None:
    prompt = make_prompt(50, seed=11)
    with (
        stack.faults["decode-0"].hold("step", skip=15) as fault_0,
        stack.faults["decode-1"].hold("step", skip=15) as fault_1,
    ):
        chunks = stack.begin_stream(prompt, 60)
        assert eventually(lambda: fault_0.num_reached + fault_1.num_reached == 1)
        first, second = ("decode-0", "decode-1")[:: 1 if fault_0.num_reached else -1]
        stack.workers[first].kill()
        assert eventually(lambda: fault_0.num_reached + fault_1.num_reached == 2)
        stack.restart(first)
        stack.workers[second].kill()
    stack.restart(second)
    num_seen = 0
    for chunk in chunks.result():
        assert chunk.output_index == num_seen
        num_seen += len(chunk.token_ids)
    token_ids = [token for chunk in chunks.result() for token in chunk.token_ids]
    assert token_ids == stack.reference(prompt, 60)
    stack.check_recovered()
