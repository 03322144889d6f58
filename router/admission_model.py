"""What the router has learned of its workers' speed, and the forecast made of it. Pure.

This router's own work is counted in prompt tokens, cached ones included, so that what the prefix
cache saves shows as speed. Load reports count uncached tokens only: with warm caches, what other
routers have sent is underrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SPEED_MEMORY_S = 2.0
_OUTPUT_DECAY = 0.98
_FIRST_OUTPUT_TOKENS = 128.0
_QUANTILE = 0.95
_QUANTILE_STEP = 0.1
_FIRST_MARGIN = 1.5
_MAX_MARGIN = 4.0


class RatioMeter:
    """Sum of amounts over sum of spans, where newer samples count more.

    `decay` of a sample: what is left of the weight of all before it.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        """None before the first sample."""
        self._amount = 0.0
        self._span = 0.0

    def add(self, amount: float, span: float, decay: float) -> None:
        self._amount = decay * self._amount + amount
        self._span = decay * self._span + span
        if self._span > 0:
            self.value = self._amount / self._span


class SpeedMeter:
    """Tokens a second of one worker, over the last seconds in which it was busy.

    Forgetting goes by time, not by samples: prompts of one step end together, the later ones
    after no time at all, and count as one.
    """

    def __init__(self) -> None:
        self._ratio = RatioMeter()

    @property
    def value(self) -> float | None:
        return self._ratio.value

    def add(self, num_tokens: int, busy_s: float) -> None:
        self._ratio.add(num_tokens, busy_s, math.exp(-busy_s / _SPEED_MEMORY_S))


class OutputMeter:
    """How many tokens an answer has, in the mean."""

    def __init__(self) -> None:
        self._mean = _FIRST_OUTPUT_TOKENS

    def add(self, num_tokens: int) -> None:
        self._mean = _OUTPUT_DECAY * self._mean + (1 - _OUTPUT_DECAY) * num_tokens

    def expected(self, max_tokens: int) -> int:
        """What an answer of at most `max_tokens` is expected to have."""
        return min(max_tokens, math.ceil(self._mean))


class Margin:
    """Factor on a forecast that makes it hold for 19 of 20 requests, learned from outcomes.

    A step up when the truth was above, a small one down when it was not: at rest, one in
    twenty is above (stochastic approximation of a quantile, Robbins and Monro 1951).
    """

    def __init__(self) -> None:
        self.value = _FIRST_MARGIN

    def observe(self, forecast_s: float, actual_s: float) -> None:
        is_above = actual_s > self.value * forecast_s
        step = _QUANTILE if is_above else _QUANTILE - 1.0
        self.value *= 1.0 + _QUANTILE_STEP * step
        self.value = min(_MAX_MARGIN, max(1.0, self.value))


@dataclass(frozen=True)
class Backlog:
    """What is to be done before a new request, and how fast it is being done."""

    tokens_ahead: float
    """Prompt tokens in flight and in line before it."""
    tokens_per_s: float
    """Of all prefill workers together."""
    num_prefill: int
    blocks_short: float = 0.0
    """Blocks that must become free on decode before its turn; 0: there is room."""
    blocks_per_s: float = math.inf
    """How fast they do."""


@dataclass(frozen=True)
class Forecast:
    """When the first token is expected, in seconds from now.

    The first token comes from the prefill worker and does not wait for the transfer of KV;
    decode's part in it is the wait for room.
    """

    wait_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.prefill_s


def forecast(backlog: Backlog, num_tokens: int) -> Forecast:
    """For a prompt of `num_tokens`: the two queues empty side by side, so the longer counts."""
    prefill_s = num_tokens * backlog.num_prefill / backlog.tokens_per_s
    prefill_wait_s = backlog.tokens_ahead / backlog.tokens_per_s
    decode_wait_s = backlog.blocks_short / backlog.blocks_per_s
    return Forecast(wait_s=max(prefill_wait_s, decode_wait_s), prefill_s=prefill_s)


def excess_s(expected: Forecast, margin: float, limit_s: float) -> float:
    """By how much a first token is expected too late for `limit_s`; at most 0 when in time.

    A prompt that takes longer than the limit by itself cannot keep it anywhere: only its wait
    is held against it.
    """
    if margin * expected.prefill_s > limit_s:
        return margin * expected.wait_s - limit_s
    return margin * expected.ttft_s - limit_s
