"""The chaos benchmark is worth as much as its judgment of outputs."""

from __future__ import annotations

import random

import pytest

from baton.v1 import inference_pb2, types_pb2
from bench.chaos_cases import (
    Answer,
    Case,
    Checker,
    Variant,
    WrongOutput,
    draw_cases,
    draw_variant,
    tie_probes,
)

LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP


def case(**sampling: float) -> Case:
    return Case(0, (1, 2, 3), types_pb2.SamplingParams(seed=5, **sampling))  # type: ignore[arg-type]


def message(
    index: int, tokens: list[int], finish: int = 0, usage: tuple[int, int] = (3, 4)
) -> inference_pb2.GenerateResponse:
    last = {"usage": inference_pb2.Usage(prompt_tokens=usage[0], completion_tokens=usage[1])}
    return inference_pb2.GenerateResponse(
        output_index=index,
        token_ids=tokens,
        finish_reason=finish,  # type: ignore[arg-type]
        **(last if finish else {}),
    )


def check(*messages: inference_pb2.GenerateResponse) -> Checker:
    """A checker that expects tokens 7, 8, 9, 10 and has seen these messages."""
    variant = Variant(case(), inference_pb2.GenerateRequest(), Answer([7, 8, 9, 10], [], LENGTH))
    checker = Checker(variant)
    for each in messages:
        checker.add(each)
    return checker


def test_the_right_answer_in_pieces_is_right_and_finished() -> None:
    assert not check(message(0, [7, 8])).is_finished
    assert check(message(0, [7]), message(1, [8, 9]), message(3, [10], LENGTH)).is_finished


@pytest.mark.parametrize(
    "messages",
    [
        [message(0, [7, 9])],
        [message(1, [8])],
        [message(0, [7, 8]), message(1, [8])],
        [message(0, [7, 8]), message(3, [10])],
        [message(0, [7, 8, 9], LENGTH)],
        [message(0, [7, 8, 9, 10, 11], LENGTH)],
        [message(0, [7, 8, 9, 10], STOP)],
        [message(0, [7, 8, 9, 10], LENGTH, usage=(3, 5))],
    ],
    ids=["wrong", "missing", "repeated", "gap", "short", "long", "reason", "usage"],
)
def test_any_other_answer_is_wrong(messages: list[inference_pb2.GenerateResponse]) -> None:
    with pytest.raises(WrongOutput):
        check(*messages)


def test_a_wrong_answer_tells_the_tokens_up_to_the_first_wrong_one() -> None:
    with pytest.raises(WrongOutput) as caught:
        check(message(0, [7, 5, 9]))
    assert caught.value.other == [7, 5]


def test_a_shorter_request_expects_the_beginning_of_the_known_answer() -> None:
    known = Answer(list(range(48)), [], LENGTH)
    for seed in range(50):
        variant = draw_variant(case(), known, random.Random(seed))
        num_tokens = len(variant.expected.token_ids)
        assert variant.expected.token_ids == list(range(num_tokens))
        stops = variant.request.sampling.stop_token_ids
        is_cut_by_length = num_tokens == variant.request.sampling.max_tokens and not stops
        assert variant.expected.finish_reason == (LENGTH if is_cut_by_length else STOP)


def test_the_same_seed_draws_the_same_cases() -> None:
    model = inference_pb2.ModelInfo(vocab_size=288, max_model_len=512)
    first, second = (draw_cases(20, model, random.Random(3)) for _ in range(2))
    assert first == second
    assert max(len(each.prompt) for each in first) < 512 - 48


def test_a_greedy_case_is_probed_by_draws_among_equals_and_a_drawn_one_by_its_temperature() -> None:
    greedy = tie_probes(case(temperature=0.0), 2)
    assert all(0 < probe.sampling.temperature < 1e-3 for probe in greedy)
    assert len({probe.sampling.seed for probe in greedy}) == len(greedy)
    drawn = tie_probes(case(temperature=0.5), 2)
    assert {probe.sampling.seed for probe in drawn} == {5}
    assert all(0 < abs(probe.sampling.temperature - 0.5) < 1e-3 for probe in drawn)
