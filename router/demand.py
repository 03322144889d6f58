"""Demand by role, which autoscaling goes by: whole totals, each request counted once. Pure.

Workers report what they have taken in, routers add what only they know: who waits in line,
and who was refused. A request that waits for room on decode is decode's demand wherever it
waits, or a full decode would have prefill scaled up.

What was refused counts as if it had been let in: its rate times the time that it would have
taken is how many there would be at any moment (Little's law). So early refusal does not hide
the demand that it turns away.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from baton.v1 import types_pb2
from core.errors import Unavailable

MEMORY_S = 30.0
"""Over which demand is averaged: two rounds of the autoscaler, half of a pod's start."""
REFUSED_WINDOW_S = 15.0
"""Span over which the rate of refusals is measured: that of a round of the autoscaler."""


@dataclass(frozen=True)
class Totals:
    """What the workers of each role have to do, or would have."""

    prefill_prompts: float = 0.0
    """Queued and running."""
    prefill_queued_tokens: float = 0.0
    """Of them, tokens still to compute."""
    decode_sequences: float = 0.0
    """Running, being read, or waiting for room."""
    decode_blocks: float = 0.0
    """Referenced, or needed by who waits for room."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def worker_totals(role: types_pb2.Role.ValueType, load: types_pb2.Load) -> Totals:
    """What a worker's report says."""
    if role == types_pb2.ROLE_PREFILL:
        return Totals(
            prefill_prompts=load.queue_depth - load.held_requests + load.running,
            prefill_queued_tokens=load.queued_tokens - load.held_tokens,
            decode_sequences=load.held_requests,
            decode_blocks=load.held_blocks,
        )
    return Totals(
        decode_sequences=load.queue_depth + load.running + load.imports,
        decode_blocks=load.blocks.referenced + load.held_blocks,
    )


@dataclass(frozen=True)
class Work:
    """What requests ask of the workers. Blocks are counted on decode."""

    num_requests: int = 0
    num_tokens: int = 0
    num_blocks: int = 0

    def waits_for(self, role: types_pb2.Role.ValueType) -> Totals:
        """As demand of the one role whose workers have no room for it."""
        if role == types_pb2.ROLE_PREFILL:
            return Totals(prefill_prompts=self.num_requests, prefill_queued_tokens=self.num_tokens)
        return Totals(decode_sequences=self.num_requests, decode_blocks=self.num_blocks)


@dataclass(frozen=True)
class Pace:
    """How fast workers are: seconds for a prompt token, and of a sequence on decode."""

    prefill_s_per_token: float
    decode_s: float


class RefusedWork:
    """Requests that were turned away lately, for want of capacity and not for a quota."""

    def __init__(self, window_s: float = REFUSED_WINDOW_S) -> None:
        self._window_s = window_s
        self._refused: deque[tuple[float, float, Work]] = deque()

    def note(self, work: Work, patience_s: float, now: float) -> None:
        """One was refused at `now` that would have waited for `patience_s`."""
        self._refused.append((now, patience_s, work))
        self._forget_old(now)

    def totals(self, pace: Pace, now: float) -> Totals:
        """How much of it there would be now. Its wait for prefill counts: a queue is what a
        worker that is busy all the time has."""
        self._forget_old(now)
        prompts = tokens = sequences = blocks = 0.0
        for _, patience_s, work in self._refused:
            prefill_s = patience_s + work.num_tokens * pace.prefill_s_per_token
            prompts += work.num_requests * prefill_s
            tokens += work.num_tokens * prefill_s
            sequences += work.num_requests * pace.decode_s
            blocks += work.num_blocks * pace.decode_s
        span = self._window_s
        return Totals(prompts / span, tokens / span, sequences / span, blocks / span)

    def _forget_old(self, now: float) -> None:
        while self._refused and self._refused[0][0] <= now - self._window_s:
            self._refused.popleft()


class DemandAverage:
    """Demand over the last seconds: a queue that is looked at once in a while shows its bursts,
    and a fleet that follows those is too large, and never at rest.

    An exponential average by time, with `memory_s` as its time constant.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._value: Totals | None = None
        self._at = 0.0

    def add(self, totals: Totals, now: float) -> Totals:
        """One sample; the average with it."""
        if self._value is None:
            self._value = totals
        else:
            share = 1.0 - math.exp(-(now - self._at) / self._memory_s)
            old, new = astuple(self._value), astuple(totals)
            mean = (a + share * (b - a) for a, b in zip(old, new, strict=True))
            self._value = Totals(*mean)
        self._at = now
        return self._value


Deployment = tuple[str, str]
"""(release, model)."""


def sum_up(
    routers: Iterable[types_pb2.RouterDemand], workers: Iterable[types_pb2.WorkerRecord]
) -> dict[Deployment, Totals]:
    """The demand of every deployment that has a router.

    Raises Unavailable when the workers that a router uses have not reported: a sum without
    them would look as if there were nothing to do.
    """
    reported = list(workers)
    sums: dict[Deployment, Totals] = {}
    digests: dict[Deployment, str] = {}
    for router in routers:
        key = (router.release, router.model)
        _require_reports(router, reported)
        own = Totals(
            router.prefill_prompts,
            router.prefill_queued_tokens,
            router.decode_sequences,
            router.decode_blocks,
        )
        sums[key] = sums.get(key, Totals()) + own
        digests[key] = router.model_digest or digests.get(key, "")
    for key, digest in digests.items():
        for record in reported:
            if record.fingerprint.model == digest:
                sums[key] += worker_totals(record.role, record.load)
    return sums


def _require_reports(
    router: types_pb2.RouterDemand, workers: Iterable[types_pb2.WorkerRecord]
) -> None:
    roles = {record.role for record in workers if record.fingerprint.model == router.model_digest}
    for role, count in (
        (types_pb2.ROLE_PREFILL, router.num_prefill),
        (types_pb2.ROLE_DECODE, router.num_decode),
    ):
        if count and role not in roles:
            name = types_pb2.Role.Name(role).removeprefix("ROLE_").lower()
            raise Unavailable(f"the {name} workers of {router.release} have not reported")
