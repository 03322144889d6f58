"""From how many uncached tokens on a hand-off is worth it.

Two stacks of SmolLM2 in float32, a core for prefill and one for decode, shared memory between
them: one hands every prompt off, in the other decode computes all prompts itself. Both are
asked the same, one after the other in random order, each prompt being new; once with idle
workers and once beside sequences that decode is generating.

`ttft_ms` and `second_ms` (until the second token, which needs decode) are medians. `stall` is
the longest gap of the running sequences meanwhile, over their median gap. The crossing point is
where both ways take equally long to the first token, by lines through the medians; it is what
`--local-prefill-max-tokens` is about, and what the router learns by itself, beginning at
`--local-prefill-start-tokens`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from bench.handoff_stacks import MAX_MODEL_LEN, SHARED_MEMORY, Model, serving
from bench.report import Reporter, argument_parser
from bench.timing import timed_request
from client import AsyncBatonClient
from engine.fetch_smollm2 import default_folder, fetch

SIZES = (8, 16, 32, 64, 128, 256)
REPETITIONS = 7
QUICK_REPETITIONS = 3
NUM_RUNNING = 4
NUM_OUTPUTS = 4
NUM_BEFORE = 8
"""Tokens of each running sequence before anything is measured."""
WAYS = {"handed off": 0, "on decode": MAX_MODEL_LEN}
"""The router's limit for staying on decode."""


@dataclass
class RunningSequence:
    """One that runs beside what is measured: when its tokens came."""

    arrivals: list[float] = field(default_factory=list)
    is_under_way: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, client: AsyncBatonClient, prompt: Sequence[int]) -> None:
        """Until cancelled."""
        async with client.stream(
            token_ids=prompt, max_tokens=2000, temperature=0.0, ignore_eos=True
        ) as stream:
            async for chunk in stream:
                self.arrivals += [time.perf_counter()] * len(chunk.token_ids)
                if len(self.arrivals) >= NUM_BEFORE:
                    self.is_under_way.set()


def gaps(sequences: Sequence[RunningSequence], begin: float, end: float) -> list[float]:
    """Seconds between a sequence's tokens, of those that came in the interval."""
    return [
        later - earlier
        for sequence in sequences
        for earlier, later in pairwise(sequence.arrivals)
        if begin <= later <= end
    ]


@dataclass(frozen=True)
class Sample:
    """One request."""

    ttft_s: float
    second_s: float
    stall: float
    """0 when nothing ran beside it."""


class Sweep:
    """Measures both ways with `num_running` sequences beside."""

    def __init__(self, model: Model, num_running: int) -> None:
        self._model = model
        self._num_running = num_running
        self._draw = random.Random(0)
        self.samples: dict[tuple[str, int], list[Sample]] = {}

    async def run(self, clients: dict[str, AsyncBatonClient], num_rounds: int) -> None:
        """`num_rounds` requests of each size over each way."""
        for size in SIZES:
            for _ in range(num_rounds):
                for way in self._draw.sample(list(clients), len(clients)):
                    sample = await self._measure(clients[way], size)
                    self.samples.setdefault((way, size), []).append(sample)

    def median(self, way: str, size: int, name: str) -> float:
        """Of all samples of a kind."""
        values: list[float] = [getattr(sample, name) for sample in self.samples[way, size]]
        return median(values)

    def crossing(self) -> float:
        """Tokens at which both ways take equally long; infinity if decode is always sooner."""
        lines = [
            np.polyfit(SIZES, [self.median(way, size, "ttft_s") for size in SIZES], 1)
            for way in WAYS
        ]
        (slope, offset), (local_slope, local_offset) = lines
        if local_slope <= slope:
            return float("inf")
        return max(0.0, float((offset - local_offset) / (local_slope - slope)))

    async def _measure(self, client: AsyncBatonClient, size: int) -> Sample:
        async with self._running(client) as running:
            began_at = time.perf_counter()
            timing, route = await timed_request(client, self._prompt(size), NUM_OUTPUTS)
            ended_at = time.perf_counter()
            assert route.cached_tokens == 0 and route.attempts == 1, f"disturbed: {route}"
        stall = 0.0
        if self._num_running:
            usual = median(gaps(running, 0, began_at))
            stall = max(gaps(running, began_at, ended_at)) / usual
        return Sample(timing.ttft_s, timing.ttft_s + timing.second_gap_s, stall)

    def _prompt(self, size: int) -> list[int]:
        return [self._draw.randrange(1, self._model.vocab_size) for _ in range(size)]

    @asynccontextmanager
    async def _running(self, client: AsyncBatonClient) -> AsyncIterator[list[RunningSequence]]:
        """Sequences that generate until the context ends."""
        sequences = [RunningSequence() for _ in range(self._num_running)]
        tasks = [
            asyncio.create_task(sequence.generate(client, self._prompt(32)))
            for sequence in sequences
        ]
        try:
            for sequence in sequences:
                await sequence.is_under_way.wait()
            yield sequences
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def run(reporter: Reporter, is_quick: bool) -> None:
    model = Model("SmolLM2", await asyncio.to_thread(fetch, default_folder()))
    num_rounds = QUICK_REPETITIONS if is_quick else REPETITIONS
    async with AsyncExitStack() as stack:
        clients = {}
        for way, limit in WAYS.items():
            served = serving(model, SHARED_MEMORY, (), local_prefill=limit)
            clients[way] = await stack.enter_async_context(served)
        for num_running in (0, NUM_RUNNING):
            sweep = Sweep(model, num_running)
            await sweep.run(clients, num_rounds)
            _report(reporter, sweep, num_running)


def _report(reporter: Reporter, sweep: Sweep, num_running: int) -> None:
    for size in SIZES:
        for way in WAYS:
            reporter.row(
                way=way,
                running=num_running,
                uncached=size,
                ttft_ms=sweep.median(way, size, "ttft_s") * 1e3,
                second_ms=sweep.median(way, size, "second_s") * 1e3,
                stall=sweep.median(way, size, "stall"),
            )
    reporter.row(running=num_running, crossing_tokens=sweep.crossing())
    least = SIZES[0]
    both = [sweep.median(way, least, "second_s") for way in WAYS]
    reporter.check(
        f"second token of {least} tokens that stay on decode, beside {num_running}",
        both[1] / both[0],
        "of handed off",
        "< 1",
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    arguments = parser.parse_args()
    reporter = Reporter("local_prefill", arguments.json)
    asyncio.run(run(reporter, arguments.quick))
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
