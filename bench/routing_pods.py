"""Pods of `bench.routing` in simulated time: costs, caches, and the prefill pod.

A prefill pod computes one prompt after the other. Room on decode is taken for the whole
request when prefill begins with it; one that finds no room is passed over.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from bench.routing_trace import TRACE_BLOCK, LruBlocks, Request
from router.routing import Work

BLOCK = 16
"""Tokens of a block as the router counts them."""
PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class CostModel:
    """Seconds that things take."""

    prefill_step_s: float
    prefill_token_s: float
    attended_s: float
    """Per pair of a prompt token and one before it."""
    decode_step_s: float
    sequence_s: float
    context_token_s: float
    handoff_s: float
    moved_token_s: float

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Computing so many tokens of a prompt behind others that are held."""
        pairs = num_tokens * (num_before + num_tokens / 2)
        steps = math.ceil(num_tokens / PREFILL_CHUNK)
        return (
            steps * self.prefill_step_s
            + num_tokens * self.prefill_token_s
            + pairs * self.attended_s
        )

    def decode_s(self, num_sequences: int, context_tokens: float) -> float:
        """One step."""
        return (
            self.decode_step_s
            + num_sequences * self.sequence_s
            + context_tokens * self.context_token_s
        )


class DecodeSide(Protocol):
    """A decode pod as a prefill pod sees it."""

    holdings: Holdings

    def take_room(self, job: Job, retry: Callable[[], None]) -> bool: ...

    def run(self, job: Job) -> None: ...


@dataclass(eq=False)
class Job:
    """A request on its way."""

    number: int
    request: Request
    on_first_token: Callable[[Job], None]
    on_end: Callable[[Job], None]
    decode: DecodeSide
    computed_tokens: int = 0
    waits_uncached: int = 0
    """What its prefill pod expected on arrival to have to compute."""
    started_at: float = 0.0
    began_step: float = 0.0
    has_room: bool = False

    @property
    def num_blocks(self) -> int:
        return math.ceil((self.request.num_prompt + self.request.num_outputs) / BLOCK)


class Clock:
    """Simulated time, and what shall happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, action))
        self._num_events += 1

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass
class Holdings:
    """A pod's cache, and what the prefix index knows of it: the same, `lag_s` later."""

    cache: LruBlocks
    clock: Clock
    lag_s: float
    _known: set[int] = field(default_factory=set)
    _news: deque[tuple[float, list[int], list[int]]] = field(default_factory=deque)

    def store(self, hash_ids: tuple[int, ...]) -> None:
        added, evicted = self.cache.store(hash_ids)
        if added or evicted:
            self._news.append((self.clock.now + self.lag_s, added, evicted))

    def num_known(self, hash_ids: tuple[int, ...]) -> int:
        """Leading trace blocks that the index says are held."""
        while self._news and self._news[0][0] <= self.clock.now:
            _, added, evicted = self._news.popleft()
            self._known.update(added)
            self._known.difference_update(evicted)
        for index, block in enumerate(hash_ids):
            if block not in self._known:
                return index
        return len(hash_ids)


class PrefillPod:
    """Computes prompts, first come first served."""

    def __init__(self, name: str, costs: CostModel, holdings: Holdings) -> None:
        self.name = name
        self.holdings = holdings
        self.busy_s = 0.0
        self._costs = costs
        self._clock = holdings.clock
        self._queue: deque[Job] = deque()
        self._current: Job | None = None
        self._ends_at = 0.0

    def add(self, job: Job) -> None:
        held = self.holdings.cache.num_held(job.request.hash_ids) * TRACE_BLOCK
        job.waits_uncached = job.request.num_prompt - min(held, job.request.num_prompt - 1)
        self._queue.append(job)
        self._begin()

    def report(self) -> Work:
        """What a load report says now."""
        tokens = sum(job.waits_uncached for job in self._queue)
        if self._current is not None:
            left = self._ends_at - self._clock.now
            took = self._ends_at - self._current.started_at
            tokens += int(self._current.computed_tokens * left / took)
        return Work(queued_blocks=tokens / BLOCK)

    def _begin(self) -> None:
        """The first in line whose decode pod has room."""
        if self._current is not None:
            return
        for job in self._queue:
            if job.decode.take_room(job, self._begin):
                break
        else:
            return
        self._queue.remove(job)
        request = job.request
        held = self.holdings.cache.num_held(request.hash_ids) * TRACE_BLOCK
        held = min(held, request.num_prompt - 1)
        job.computed_tokens = request.num_prompt - held
        job.started_at = self._clock.now
        took_s = self._costs.prefill_s(job.computed_tokens, held)
        self.busy_s += took_s
        self._current = job
        self._ends_at = self._clock.now + took_s
        self._clock.at(self._ends_at, self._end)

    def _end(self) -> None:
        job, self._current = self._current, None
        assert job is not None
        self.holdings.store(job.request.hash_ids)
        job.on_first_token(job)
        lacking = job.request.num_prompt
        lacking -= job.decode.holdings.cache.num_held(job.request.hash_ids) * TRACE_BLOCK
        moved_s = self._costs.handoff_s + lacking * self._costs.moved_token_s
        self._clock.at(self._clock.now + moved_s, lambda: job.decode.run(job))
        self._begin()
