"""Requests for `bench.routing`: read from a trace, or made up; and how good a cache could be.

A trace has JSON lines: `timestamp` (ms), `input_length` and `output_length` (tokens), and
`hash_ids`, one for each 512 tokens of the prompt, of which equal ids mean equal prefixes
(the format of the traces published with Mooncake, Qin et al., FAST 2025).
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TRACE_BLOCK = 512
"""Tokens that one hash id stands for."""


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival_s: float
    num_prompt: int
    num_outputs: int
    hash_ids: tuple[int, ...]
    """Of the prompt's full blocks."""


def read_trace(path: Path) -> list[Request]:
    """Every request, in order of arrival."""
    with path.open() as lines:
        entries = [json.loads(line) for line in lines]
    requests = [
        Request(
            arrival_s=entry["timestamp"] / 1e3,
            num_prompt=entry["input_length"],
            num_outputs=max(1, entry["output_length"]),
            hash_ids=tuple(entry["hash_ids"][: entry["input_length"] // TRACE_BLOCK]),
        )
        for entry in entries
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def synthetic_trace(num_requests: int, seed: int) -> list[Request]:
    """Conversations that arrive at random and share one of 100 system prompts.

    A system prompt has 1 or 2 blocks. Each turn adds a log-normal number of tokens to its
    conversation, the first one with a median of 4,000 and later ones of 600; a turn follows
    with a probability of 0.5 after 10 to 120 seconds. Conversations begin as a Poisson
    process of one a second. An answer has about 300 tokens.
    """
    draw = random.Random(seed)
    ids = itertools.count()
    systems = [tuple(itertools.islice(ids, draw.randint(1, 2))) for _ in range(100)]
    requests: list[Request] = []
    began_s = 0.0
    while len(requests) < num_requests:
        began_s += draw.expovariate(1.0)
        blocks = list(draw.choice(systems))
        num_prompt = len(blocks) * TRACE_BLOCK + int(draw.lognormvariate(math.log(4000), 0.8))
        at_s = began_s
        while True:
            blocks += itertools.islice(ids, num_prompt // TRACE_BLOCK - len(blocks))
            num_outputs = 1 + int(draw.expovariate(1 / 300))
            requests.append(Request(at_s, num_prompt, num_outputs, tuple(blocks)))
            if draw.random() > 0.5:
                break
            at_s += draw.uniform(10, 120)
            num_prompt += num_outputs + int(draw.lognormvariate(math.log(600), 0.8))
    return sorted(requests, key=lambda request: request.arrival_s)[:num_requests]


def hot_trace(num_requests: int, num_prefixes: int, seed: int) -> list[Request]:
    """Single requests, each of which begins with one of a few prompts of 4 to 8 blocks.

    What follows has a log-normal number of tokens with a median of 600, an answer about 300.
    """
    draw = random.Random(seed)
    ids = itertools.count()
    prefixes = [tuple(itertools.islice(ids, draw.randint(4, 8))) for _ in range(num_prefixes)]
    requests = []
    at_s = 0.0
    for _ in range(num_requests):
        at_s += draw.expovariate(1.0)
        prefix = draw.choice(prefixes)
        num_prompt = len(prefix) * TRACE_BLOCK + int(draw.lognormvariate(math.log(600), 0.8))
        own = itertools.islice(ids, num_prompt // TRACE_BLOCK - len(prefix))
        num_outputs = 1 + int(draw.expovariate(1 / 300))
        requests.append(Request(at_s, num_prompt, num_outputs, (*prefix, *own)))
    return requests


def stretched(requests: Iterable[Request], factor: float) -> list[Request]:
    """The same requests with `factor` times the time between them."""
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


class LruBlocks:
    """A cache of so many trace blocks. A prefix outlives what hangs below it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_held(self, hash_ids: Sequence[int]) -> int:
        """Length of the longest held prefix."""
        for index, block in enumerate(hash_ids):
            if block not in self._blocks:
                return index
        return len(hash_ids)

    def store(self, hash_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Uses these blocks now. Returns (blocks that are new, blocks evicted for them)."""
        added = [block for block in hash_ids if block not in self._blocks]
        for block in reversed(hash_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        evicted = []
        while len(self._blocks) > self._capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        return added, evicted


def ideal_hit_tokens(requests: Iterable[Request], num_blocks: int) -> list[int]:
    """Tokens of each prompt that one cache of `num_blocks` would have held."""
    cache = LruBlocks(num_blocks)
    hits = []
    for request in requests:
        hits.append(cache.num_held(request.hash_ids) * TRACE_BLOCK)
        cache.store(request.hash_ids)
    return hits
