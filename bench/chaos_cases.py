"""Requests whose right answers are known: drawn from a seed, answered by an undisturbed stack.

In float32 a token depends on prompt, sampling and output index alone, never on the batch, the
cache or the worker. So the start of a known answer is the right answer to a shorter request,
and what a request got before it was cut off can be judged too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from baton.v1 import inference_pb2, types_pb2

MAX_OUTPUTS = 48
_MIN_OUTPUTS, _FEW_OUTPUTS = 2, 8
_LOGPROB_TOLERANCE = 1e-3
_NUM_PREFIXES = 6
_SAMPLINGS = (
    types_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
    types_pb2.SamplingParams(temperature=0.0, logprobs=1),
    types_pb2.SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
    types_pb2.SamplingParams(temperature=0.8),
    # Few candidates: the more there are, the likelier two of them are equally likely.
    types_pb2.SamplingParams(temperature=0.5, top_p=0.7, min_p=0.01, ignore_eos=True),
)
_NUM_TIE_SEEDS = 12


@dataclass(frozen=True)
class Case:
    """A prompt with its sampling, seed included."""

    index: int
    prompt: tuple[int, ...]
    sampling: types_pb2.SamplingParams

    def request(self, max_tokens: int) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=self.prompt), sampling=self.sampling
        )
        request.sampling.max_tokens = max_tokens
        return request


@dataclass
class Answer:
    """What a request got, or should get. Appended to by `Checker`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: int = types_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self.token_ids += message.token_ids
        self.logprobs += [entry.logprob for entry in message.logprobs]
        self.finish_reason = message.finish_reason

    def cut(self, num_tokens: int, reason: int) -> Answer:
        """What a request that ends earlier, for `reason`, should get."""
        return Answer(self.token_ids[:num_tokens], self.logprobs[:num_tokens], reason)


@dataclass(frozen=True)
class Variant:
    """One request for a case, and its right answer."""

    case: Case
    request: inference_pb2.GenerateRequest
    expected: Answer


def draw_cases(count: int, model: inference_pb2.ModelInfo, rng: random.Random) -> list[Case]:
    """Short prompts, long ones, and ones that share prefixes of several blocks."""
    longest = min(400, model.max_model_len - MAX_OUTPUTS - 1)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(model.vocab_size) for _ in range(rng.randint(low, high)))

    prefixes = [tokens(longest // 4, longest // 2) for _ in range(_NUM_PREFIXES)]
    cases = []
    for index in range(count):
        prompt = rng.choice(
            (
                lambda: tokens(1, 48),
                lambda: tokens(longest // 3, longest),
                lambda: rng.choice(prefixes) + tokens(1, longest // 3),
            )
        )()
        sampling = types_pb2.SamplingParams(seed=rng.getrandbits(63))
        sampling.MergeFrom(_SAMPLINGS[index % len(_SAMPLINGS)])
        cases.append(Case(index, prompt, sampling))
    return cases


def draw_variant(case: Case, known: Answer, rng: random.Random) -> Variant:
    """A request for the beginning of a known answer: by length, or by a stop token in it."""
    # Half of them short: most of their life is the hand-off.
    max_tokens = rng.randint(_MIN_OUTPUTS, rng.choice((_FEW_OUTPUTS, MAX_OUTPUTS)))
    request = case.request(max_tokens)
    request.request_id = f"case-{case.index}-{rng.getrandbits(48):x}"
    if max_tokens < len(known.token_ids):
        expected = known.cut(max_tokens, types_pb2.FINISH_REASON_LENGTH)
    else:
        expected = known
    if rng.random() < 0.2:
        stop = rng.choice(expected.token_ids)
        request.sampling.stop_token_ids.append(stop)
        end = expected.token_ids.index(stop) + 1
        expected = expected.cut(end, types_pb2.FINISH_REASON_STOP)
    return Variant(case, request, expected)


class WrongOutput(Exception):
    """A message of a stream is not what an undisturbed run gives.

    `other`: the first token that differs, with those before it.
    """

    def __init__(self, message: str, other: list[int] | None = None) -> None:
        super().__init__(message)
        self.other = other


class Checker:
    """Follows one stream and compares every message with the right answer."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._answer = Answer()

    @property
    def is_finished(self) -> bool:
        return self._answer.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Raises WrongOutput."""
        answer, expected = self._answer, self._variant.expected
        self._require("output_index", message.output_index, len(answer.token_ids))
        answer.add(message)
        start = expected.cut(len(answer.token_ids), answer.finish_reason)
        self._require_tokens(start.token_ids)
        self._require("logprobs", len(answer.logprobs), len(start.logprobs))
        for got, wanted in zip(answer.logprobs, start.logprobs, strict=True):
            if not math.isclose(got, wanted, abs_tol=_LOGPROB_TOLERANCE):
                self._require("logprob", got, wanted)
        if self.is_finished:
            self._require_tokens(expected.token_ids)
            self._require("finish_reason", answer.finish_reason, expected.finish_reason)
            usage = (message.usage.prompt_tokens, message.usage.completion_tokens)
            wanted_usage = (len(self._variant.case.prompt), len(expected.token_ids))
            self._require("usage", usage, wanted_usage)

    def _require_tokens(self, wanted: list[int]) -> None:
        got = self._answer.token_ids
        for index, pair in enumerate(zip(got, wanted, strict=False)):
            if pair[0] != pair[1]:
                message = f"token {index} is {pair[0]}, not {pair[1]}"
                raise WrongOutput(self._named(message), got[: index + 1])
        self._require("number of tokens", len(got), len(wanted))

    def _require(self, name: str, got: object, wanted: object) -> None:
        if got != wanted:
            raise WrongOutput(self._named(f"{name} is {got}, not {wanted}"))

    def _named(self, message: str) -> str:
        return f"case {self._variant.case.index}: {message}"


def tie_probes(case: Case, num_tokens: int) -> list[inference_pb2.GenerateRequest]:
    """The case, disturbed less than rounding might: near ties of two tokens fall both ways.

    With temperatures near 0 greedy choices become draws among equals; temperatures a little
    off move the bounds between tokens that are drawn.
    """
    probes = []
    if case.sampling.temperature == 0:
        changes = [
            types_pb2.SamplingParams(temperature=1e-4, seed=seed) for seed in range(_NUM_TIE_SEEDS)
        ]
    else:
        temperature = case.sampling.temperature
        changes = [
            types_pb2.SamplingParams(temperature=temperature * (1 + shift))
            for shift in (-1e-4, -1e-5, 1e-5, 1e-4)
        ]
    for change in changes:
        probe = case.request(num_tokens)
        probe.sampling.MergeFrom(change)
        probes.append(probe)
    return probes
