"""Which requests a load consists of: when each is due, its prompt, and how much it asks for.

Pure: a seed makes one load, and nothing here waits for an answer. A schedule that did would
send less to a server that is slow, and hide its delays (coordinated omission).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.routing_trace import Request


@dataclass(frozen=True)
class Planned:
    """One request of a load. `due_s`: when it is to be sent, from the load's start."""

    due_s: float
    prompt: Sequence[int]
    num_outputs: int


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, each from `low` to `high` equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512` or `100-1000`. Raises ValueError."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"lengths {text!r} are not like 512 or 100-1000")
        return lengths

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.low, self.high)


DrawSizes = Callable[[random.Random], tuple[int, int]]
"""Draws a request's size: tokens of its prompt, and of its answer."""


def sizes_between(prompts: Lengths, outputs: Lengths) -> DrawSizes:
    """Both lengths independent of each other."""
    return lambda draw: (prompts.draw(draw), outputs.draw(draw))


def sizes_of_trace(trace: Sequence[Request], max_tokens: int) -> DrawSizes:
    """Those of a trace's requests that have up to `max_tokens`, prompt and answer together.

    Raises ValueError when there are none.
    """
    pairs = [(request.num_prompt, request.num_outputs) for request in trace]
    fitting = [pair for pair in pairs if pair[0] > 0 and sum(pair) <= max_tokens]
    if not fitting:
        raise ValueError(f"no request of the trace has up to {max_tokens} tokens")
    return lambda draw: draw.choice(fitting)


class Prompts:
    """Draws prompts of random tokens below `vocab_size`, which begin with the same
    `num_shared` tokens."""

    def __init__(self, vocab_size: int, draw: random.Random, num_shared: int = 0) -> None:
        # Tokens that end a text or have another special sense mostly come first or last.
        self._tokens = range(vocab_size // 4, vocab_size - vocab_size // 4)
        self._draw = draw
        self._shared = draw.choices(self._tokens, k=num_shared)

    def draw(self, num_tokens: int) -> list[int]:
        """One prompt."""
        begin = self._shared[:num_tokens]
        return begin + self._draw.choices(self._tokens, k=num_tokens - len(begin))


def poisson(rate: float, seconds: float, draw: random.Random) -> list[float]:
    """Times below `seconds` at which requests are due, `rate` a second on average."""
    times: list[float] = []
    due_s = draw.expovariate(rate)
    while due_s < seconds:
        times.append(due_s)
        due_s += draw.expovariate(rate)
    return times


def make_load(
    times: Sequence[float], sizes: DrawSizes, prompts: Prompts, draw: random.Random
) -> list[Planned]:
    """A request for each of the `times`."""
    load = []
    for due_s in times:
        num_prompt, num_outputs = sizes(draw)
        load.append(Planned(due_s, prompts.draw(num_prompt), num_outputs))
    return load
