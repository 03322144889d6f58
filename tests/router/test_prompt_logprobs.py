"""A prompt's log-probabilities come whole, before any output, and in messages that fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.v1 import types_pb2, worker_pb2
from router import service
from router.attach import TakeToken
from router.dispatch import Attempt
from router.predicted_load import PredictedLoad


class Link:
    """Stands for a worker's link."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.predicted = PredictedLoad()


PREFILL, DECODE = Link("p"), Link("d")


def scores(*values: float) -> list[types_pb2.TokenLogprobs]:
    return [types_pb2.TokenLogprobs(logprob=value) for value in values]


class Choice:
    """Notes what an attempt tells it, in order."""

    is_finished = False

    def __init__(self) -> None:
        self.told: list[object] = []

    def receive_prompt(self, logprobs: list[types_pb2.TokenLogprobs]) -> None:
        self.told.append([item.logprob for item in logprobs])

    def receive(self, output: worker_pb2.SequenceOutput) -> None:
        self.told.append(output.token_ids[0])

    def token_taker(self, on_stopped: object, on_error: object) -> TakeToken:
        return lambda _index, token_id, _now: self.told.append(token_id)


def attempt(choice: Choice) -> Attempt:
    dispatch = worker_pb2.Dispatch(request_id="r", attempt=1, n=1, prompt_logprobs=0)
    placement = SimpleNamespace(prefill=PREFILL, decode=DECODE, links=(PREFILL, DECODE))
    return Attempt(dispatch, placement, [choice], lambda _: None)  # type: ignore[arg-type, list-item]


def token(token_id: int, index: int = 0) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(output_index=index, token_ids=[token_id])


async def test_pieces_are_joined_and_what_decode_says_meanwhile_waits() -> None:
    choice = Choice()
    subject = attempt(choice)
    subject.on_output(DECODE, token(7))
    subject.on_output(PREFILL, worker_pb2.SequenceOutput(prompt_logprobs=scores(-1.0, -2.0)))
    subject.on_output(DECODE, token(8, index=1))
    subject.on_output(PREFILL, worker_pb2.SequenceOutput(prompt_logprobs=scores(-4.0)))
    assert choice.told == []
    subject.on_output(PREFILL, token(7))
    assert choice.told == [[-1.0, -2.0, -4.0], 7, 7, 8]
    subject.on_output(DECODE, token(9, index=2))
    assert choice.told[-1] == 9


async def test_single_tokens_of_decode_wait_for_them_too() -> None:
    choice = Choice()
    subject = attempt(choice)
    subject.on_output(DECODE, token(7))
    subject._taker(0, choice)(1, 8, 0.0)  # type: ignore[arg-type]
    assert choice.told == []
    subject.on_output(PREFILL, token(7))
    assert choice.told == [[], 7, 7, 8]


async def test_a_prompt_of_one_token_has_none_and_holds_nobody_up() -> None:
    choice = Choice()
    subject = attempt(choice)
    subject.on_output(DECODE, token(7))
    subject.on_output(PREFILL, token(7))
    assert choice.told == [[], 7, 7]


async def test_clients_get_them_in_messages_without_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_TOKENS_PER_CHUNK", 2)
    messages = list(service._prompt_messages(scores(-1.0, -2.0, -4.0), "r"))
    assert [[item.logprob for item in m.prompt_logprobs] for m in messages] == [[-1, -2], [-4]]
    assert [list(message.token_ids) for message in messages] == [[], []]
    assert list(service._prompt_messages([], "r")) == []
