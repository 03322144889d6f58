"""The prefix index in a real Redis: events, memory, lookups.

fill      inserts and later evictions, in batches like those of workers, and the memory they take
lookup    prompts held by 1 to 4 workers up to different lengths, and one prompt of which every
          worker holds another length, which is the worst for a search by halves
length    the first of them, shorter and shorter
workers   both for fewer candidates

Costs are CPU time of the Redis process as it counts it itself. `receive_us` is what Redis needs
to receive a prompt's block keys and hand them to a script that does nothing (`receive_p99_ms` is
its latency, which shows what the machine adds); `search_us` is the rest, the index's own.
Latencies are those of one client that asks one question after another. Of many short rounds only
the quickest quarter counts: on a shared machine the others show what its other processes do.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.index_load import Holdings, Publisher, Shape, Usage, redis_server
from bench.report import Reporter, argument_parser
from core.prefix_index import PrefixIndexReader
from core.prefix_index_store import MAX_LOOKUP_KEYS
from core.redis_client import RedisClient

SHORTENED = (128, 32, 8, 4, 2, 1)
NUM_CANDIDATES = (1, 4, 16, 64)
LOOKUPS_PER_ROUND = 100
KEY_BYTES = 8


@dataclass(frozen=True)
class Round:
    """`LOOKUPS_PER_ROUND` lookups, and as many times receiving what one sends."""

    receive_us: float
    redis_us: float
    receive_ms: list[float]
    latencies_ms: list[float]


@dataclass(frozen=True)
class LookupCost:
    """Of one lookup."""

    receive_us: float
    redis_us: float
    p50_ms: float
    p99_ms: float
    receive_p99_ms: float

    @property
    def search_us(self) -> float:
        return self.redis_us - self.receive_us

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> LookupCost:
        """Out of the quietest quarter of `rounds`."""
        by_time = sorted(rounds, key=lambda round_: sum(round_.latencies_ms))
        quiet = by_time[: -(-len(rounds) // 4)]
        latencies_ms = [latency for round_ in quiet for latency in round_.latencies_ms]
        receive_ms = [latency for round_ in quiet for latency in round_.receive_ms]
        return cls(
            receive_us=statistics.mean(round_.receive_us for round_ in quiet),
            redis_us=statistics.mean(round_.redis_us for round_ in quiet),
            p50_ms=statistics.median(latencies_ms),
            p99_ms=statistics.quantiles(latencies_ms, n=100)[98],
            receive_p99_ms=statistics.quantiles(receive_ms, n=100)[98],
        )


class IndexBench:
    """One Redis, filled once."""

    def __init__(
        self, redis: RedisClient, shape: Shape, reporter: Reporter, num_rounds: int
    ) -> None:
        rng = random.Random(0)
        self._redis = redis
        self._shape = shape
        self._reporter = reporter
        self._num_rounds = num_rounds
        self._publisher = Publisher(redis, shape.num_workers)
        self._reader = PrefixIndexReader(redis)
        self._shared = Holdings.shared_by_some(shape, rng)
        self._different = Holdings.all_different(shape, rng)

    async def run(self) -> None:
        await self._fill()
        await self._lookups()
        await self._lengths()
        await self._workers()
        await self._evict()

    async def _fill(self) -> None:
        blocks = self._shared.of_workers(self._shape.num_workers)
        num_unique = len(set().union(*blocks))
        before = await Usage.read(self._redis)
        await self._publisher.begin()
        num_entries = await self._publisher.write(blocks, True)
        after = await Usage.read(self._redis)
        self._report_events("inserts", num_entries, after.cpu_us - before.cpu_us)
        bytes_per_block = (after.memory_bytes - before.memory_bytes) / num_unique
        self._reporter.row(section="fill", what="blocks", num=num_unique, num_bytes=bytes_per_block)
        self._reporter.check("memory", bytes_per_block, "bytes per unique block", "<= 90")

    async def _evict(self) -> None:
        blocks = self._shared.of_workers(self._shape.num_workers)
        before = await Usage.read(self._redis)
        num_entries = await self._publisher.write(blocks, False)
        after = await Usage.read(self._redis)
        self._report_events("evictions", num_entries, after.cpu_us - before.cpu_us)

    def _report_events(self, what: str, num_entries: int, cpu_us: float) -> None:
        per_entry = cpu_us / num_entries
        self._reporter.row(section="fill", what=what, num=num_entries, redis_us=per_entry)
        self._reporter.check(what, 1e6 / per_entry, "per Redis-core second", ">= 500000")

    async def _lookups(self) -> None:
        everyone = self._publisher.candidates
        cost = await self._cost(self._shared.prompts, everyone)
        self._report_lookup("lookup", "held by some", cost)
        await self._publisher.write(self._different.of_workers(self._shape.num_workers), True)
        worst = await self._cost(self._different.prompts, everyone)
        self._report_lookup("lookup", "all lengths differ", worst)
        self._reporter.check("lookup, p50", cost.p50_ms, "ms", "<= 1")
        self._reporter.check("lookup, p99", cost.p99_ms, "ms", "<= 1")
        self._reporter.check("lookup, all lengths differ, p99", worst.p99_ms, "ms", "<= 3")
        self._reporter.check("lookups", 1e6 / cost.redis_us, "per Redis-core second", ">= 10000")

    async def _lengths(self) -> None:
        """Twice as long is one step more, and nothing more beyond the most keys that are sent.
        The shortest are what all workers hold."""
        search_us = []
        for divisor in SHORTENED:
            length = self._shape.prompt_blocks // divisor
            prompts = [prompt[:length] for prompt in self._shared.prompts]
            cost = await self._cost(prompts, self._publisher.candidates)
            self._report_lookup("length", f"{length} blocks", cost)
            search_us.append(cost.search_us)
        growth = search_us[-1] / search_us[-3]
        self._reporter.check("search, prompts 4 times as long", growth, "times", "<= 2")

    async def _workers(self) -> None:
        candidates = list(self._publisher.candidates.items())
        for count in (n for n in NUM_CANDIDATES if n <= self._shape.num_workers):
            for what, holdings in (("some", self._shared), ("all differ", self._different)):
                cost = await self._cost(holdings.prompts, dict(candidates[:count]))
                self._report_lookup("workers", f"{count}, {what}", cost)

    async def _cost(
        self, prompts: Sequence[Sequence[bytes]], candidates: Mapping[str, int]
    ) -> LookupCost:
        return LookupCost.of(
            [await self._round(prompts, candidates) for _ in range(self._num_rounds)]
        )

    async def _round(
        self, prompts: Sequence[Sequence[bytes]], candidates: Mapping[str, int]
    ) -> Round:
        """Asks for some of the prompts in turn."""
        num_bytes = KEY_BYTES * min(len(prompts[0]), MAX_LOOKUP_KEYS)
        blobs = [random.randbytes(num_bytes) for _ in range(LOOKUPS_PER_ROUND)]
        asked = [prompts[i % len(prompts)] for i in range(LOOKUPS_PER_ROUND)]
        before = await Usage.read(self._redis)
        receive_ms = [await _timed_ms(self._redis.eval("return 0", 0, blob)) for blob in blobs]
        between = await Usage.read(self._redis)
        latencies_ms = [
            await _timed_ms(self._reader.lookup(prompt, candidates)) for prompt in asked
        ]
        after = await Usage.read(self._redis)
        return Round(
            receive_us=(between.cpu_us - before.cpu_us) / LOOKUPS_PER_ROUND,
            redis_us=(after.cpu_us - between.cpu_us) / LOOKUPS_PER_ROUND,
            receive_ms=receive_ms,
            latencies_ms=latencies_ms,
        )

    def _report_lookup(self, section: str, what: str, cost: LookupCost) -> None:
        self._reporter.row(
            section=section,
            what=what,
            redis_us=cost.redis_us,
            receive_us=cost.receive_us,
            search_us=cost.search_us,
            p50_ms=cost.p50_ms,
            p99_ms=cost.p99_ms,
            receive_p99_ms=cost.receive_p99_ms,
        )


async def _timed_ms(call: Awaitable[Any]) -> float:
    began_at = time.perf_counter()
    await call
    return (time.perf_counter() - began_at) * 1e3


async def measure(shape: Shape, reporter: Reporter, num_rounds: int) -> None:
    """Starts a Redis, fills it with `shape`, and reports."""
    async with redis_server() as redis:
        await IndexBench(redis, shape, reporter, num_rounds).run()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the entries, few rounds")
    parser.add_argument("--workers", type=int, default=64, help="how many hold blocks [64]")
    args = parser.parse_args()
    num_entries = 100_000 if args.quick else 1_000_000
    shape = Shape(args.workers, num_entries, prompt_blocks=8192)
    reporter = Reporter("index", args.json)
    asyncio.run(measure(shape, reporter, 8 if args.quick else 40))
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
