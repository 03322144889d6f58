"""When the tokens of one request come, and how sure a median of such times is."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from client import AsyncBatonClient, Route

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """Arrivals at the client, in seconds."""

    ttft_s: float
    second_gap_s: float
    """First token to second token."""
    itl_s: float
    """Median of all later gaps."""
    total_s: float

    @property
    def exposed_s(self) -> float:
        """Hand-off time that nothing hides: what the second token takes beyond a usual one."""
        return self.second_gap_s - self.itl_s

    @classmethod
    def of(cls, began_at: float, arrivals: Sequence[float]) -> Timing:
        """`arrivals`: the time of each output token, at least three."""
        gaps = [later - earlier for earlier, later in pairwise(arrivals)]
        return cls(
            ttft_s=arrivals[0] - began_at,
            second_gap_s=gaps[0],
            itl_s=statistics.median(gaps[1:]),
            total_s=arrivals[-1] - began_at,
        )


async def timed_request(
    client: AsyncBatonClient, prompt: Sequence[int], num_outputs: int
) -> tuple[Timing, Route]:
    """Runs one greedy request that does not end early."""
    arrivals: list[float] = []
    began_at = time.perf_counter()
    async with client.stream(
        token_ids=prompt, max_tokens=num_outputs, temperature=0.0, ignore_eos=True
    ) as stream:
        async for chunk in stream:
            arrivals += [time.perf_counter()] * len(chunk.token_ids)
        completion = await stream.completion()
    return Timing.of(began_at, arrivals), completion.route


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f}, 95 % CI {self.low:.3f} to {self.high:.3f}"

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """By bootstrap: the spread of medians of resamples, drawn from a fixed seed."""
        draw = random.Random(0)
        medians = sorted(
            statistics.median(draw.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
        )
        cut = NUM_RESAMPLES // 40
        return cls(statistics.median(values), medians[cut], medians[-1 - cut])
