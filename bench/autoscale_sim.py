"""A deployment in simulated time whose fleets grow and shrink, for `bench.autoscale`.

Pods are those of `bench.routing`, without prefix caches; demand is computed by the router's own
code from load reports such as workers send. The router lets a request go when a prefill pod is
near the end of its work and a decode pod has room, and refuses one that it expects too late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from baton.v1 import types_pb2
from bench.hpa import SYNC_S
from bench.routing_decode_pod import DecodePod
from bench.routing_pods import BLOCK, Clock, CostModel, Holdings, Job, PrefillPod
from bench.routing_trace import LruBlocks, Request
from router.demand import DemandAverage, Pace, RefusedWork, Totals, Work, worker_totals

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
Role: TypeAlias = types_pb2.Role.ValueType
PREFILL_AHEAD_S = 0.1
SAMPLE_S = 1.0
PodT = TypeVar("PodT", PrefillPod, "BusyDecodePod")


class BusyDecodePod(DecodePod):
    """One that also knows for how long it had anything to do."""

    busy_s = 0.0

    def _advance(self) -> None:
        if self._jobs:
            self.busy_s += self._clock.now - self._advanced_at
        super()._advance()


@dataclass(frozen=True)
class Deployment:
    """What is simulated. `initial` replicas by role; a pod serves `startup_s` after its order."""

    costs: CostModel
    decode_blocks: int
    initial: dict[Role, int]
    startup_s: float = 60.0
    ttft_limit_s: float = 5.0


@dataclass(eq=False)
class _Member(Generic[PodT]):
    pod: PodT
    ready_at: float
    is_leaving: bool = False
    busy_before_s: float = 0.0


class Fleet(Generic[PodT]):
    """The pods of one role. `make` builds one; `work` is what a pod has to do."""

    def __init__(
        self, clock: Clock, make: Callable[[str], PodT], work: Callable[[PodT], float]
    ) -> None:
        self._clock = clock
        self._make: Callable[[str], PodT] = make
        self._work: Callable[[PodT], float] = work
        self._members: list[_Member[PodT]] = []
        self._num_made = 0
        self._counted_at = 0.0
        self.pod_seconds = 0.0

    @property
    def replicas(self) -> int:
        """Those that shall be there, ready or not."""
        return sum(not member.is_leaving for member in self._members)

    @property
    def usable(self) -> list[PodT]:
        """Those that take new work."""
        now = self._clock.now
        return [m.pod for m in self._members if not m.is_leaving and m.ready_at <= now]

    @property
    def pods(self) -> list[PodT]:
        """Those that report, leaving ones too."""
        return [m.pod for m in self._members if m.ready_at <= self._clock.now]

    def scale(self, replicas: int, startup_s: float) -> None:
        """Orders pods, or has those with least work leave when they are done."""
        self.count()
        while self.replicas < replicas:
            pod = self._make(str(self._num_made))
            self._num_made += 1
            self._members.append(_Member(pod, self._clock.now + startup_s))
        staying = [member for member in self._members if not member.is_leaving]
        staying.sort(key=lambda m: (m.ready_at <= self._clock.now, self._work(m.pod)))
        for member in staying[: len(staying) - replicas]:
            member.is_leaving = True
        self.count()

    def count(self) -> None:
        """Adds up what pods there have been, and lets go of those that have left."""
        elapsed_s = self._clock.now - self._counted_at
        self._counted_at = self._clock.now
        self.pod_seconds += elapsed_s * len(self._members)
        self._members = [m for m in self._members if not m.is_leaving or self._work(m.pod) > 0]

    def utilization(self, busy_s: Callable[[PodT], float], span_s: float) -> float:
        """Mean share of the last `span_s` in which a ready pod was busy, as its CPU tells."""
        shares = []
        for member in self._members:
            if member.ready_at <= self._clock.now and not member.is_leaving:
                total = busy_s(member.pod)
                shares.append(min(1.0, (total - member.busy_before_s) / span_s))
                member.busy_before_s = total
        return sum(shares) / len(shares) if shares else 0.0


@dataclass
class Outcome:
    """What became of the requests, and what the fleets were like at each round."""

    num_requests: int = 0
    num_refused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    replicas: dict[Role, list[int]] = field(default_factory=lambda: {PREFILL: [], DECODE: []})
    pod_seconds: float = 0.0

    def attainment(self, limit_s: float) -> float:
        """Share of all requests whose first token came within `limit_s`."""
        return sum(ttft <= limit_s for ttft in self.ttft_s) / self.num_requests


Scale = Callable[["Simulation", float], dict[Role, int]]
"""One round of an autoscaler: replicas by role."""


class Simulation:
    """One run. Use once."""

    def __init__(self, deployment: Deployment, scale: Scale) -> None:
        self.deployment = deployment
        self.clock = Clock()
        self._scale = scale
        costs = deployment.costs
        self.prefill: Fleet[PrefillPod] = Fleet(
            self.clock,
            lambda name: PrefillPod(name, costs, self._no_cache()),
            lambda pod: len(pod._queue) + (pod._current is not None),
        )
        self.decode: Fleet[BusyDecodePod] = Fleet(
            self.clock,
            lambda name: BusyDecodePod(name, costs, self._no_cache(), deployment.decode_blocks),
            lambda pod: len(pod._jobs),
        )
        self._line: deque[Job] = deque()
        self._waits_for: Role = PREFILL
        self._refused = RefusedWork()
        self._average = DemandAverage()
        self.demand = Totals()
        """As the metrics adapter tells it."""
        self._outcome = Outcome()
        self._num_open = 0

    def _no_cache(self) -> Holdings:
        return Holdings(LruBlocks(0), self.clock, 0.0)

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Plays all requests to their ends."""
        self._outcome.num_requests = self._num_open = len(requests)
        for role, replicas in self.deployment.initial.items():
            self._fleet(role).scale(replicas, startup_s=0.0)
        for number, request in enumerate(requests):
            self._arrive_at(number, request)
        self._sample(0.0)
        self._round(0.0)
        self.clock.run()
        for fleet in (self.prefill, self.decode):
            fleet.count()
            self._outcome.pod_seconds += fleet.pod_seconds
        return self._outcome

    def _demand_now(self) -> Totals:
        line = Work(
            len(self._line),
            sum(job.request.num_prompt for job in self._line),
            sum(job.num_blocks for job in self._line),
        )
        totals = line.waits_for(self._waits_for)
        totals += self._refused.totals(self._pace(), self.clock.now)
        for prefill in self.prefill.pods:
            totals += worker_totals(PREFILL, _prefill_load(prefill))
        for decode in self.decode.pods:
            totals += worker_totals(DECODE, _decode_load(decode))
        return totals

    def _fleet(self, role: Role) -> Fleet[PrefillPod] | Fleet[BusyDecodePod]:
        return self.prefill if role == PREFILL else self.decode

    def _pace(self) -> Pace:
        return Pace(self.deployment.costs.prefill_s(1000, 0) / 1000, decode_s=5.0)

    def _sample(self, at_s: float) -> None:
        def act() -> None:
            self.demand = self._average.add(self._demand_now(), self.clock.now)
            if self._num_open:
                self._sample(self.clock.now + SAMPLE_S)

        self.clock.at(at_s, act)

    def _round(self, at_s: float) -> None:
        def act() -> None:
            for role, replicas in self._scale(self, self.clock.now).items():
                fleet = self._fleet(role)
                fleet.scale(replicas, self.deployment.startup_s)
                self._outcome.replicas[role].append(fleet.replicas)
            # Pods ordered earlier may be ready now.
            self._pump()
            if self._num_open:
                self._round(self.clock.now + SYNC_S)

        self.clock.at(at_s, act)

    def _arrive_at(self, number: int, request: Request) -> None:
        def act() -> None:
            def on_first_token(job: Job) -> None:
                self._outcome.ttft_s.append(self.clock.now - request.arrival_s)
                self.clock.at(self.clock.now, self._pump)

            def on_end(job: Job) -> None:
                self._num_open -= 1
                self._pump()

            # Its decode pod is chosen when it goes.
            job = Job(number, request, on_first_token, on_end, _NOWHERE)
            if self._expected_ttft_s(job) > self.deployment.ttft_limit_s:
                self._refuse(job)
                return
            self._line.append(job)
            self._pump()

        self.clock.at(request.arrival_s, act)

    def _refuse(self, job: Job) -> None:
        work = Work(1, job.request.num_prompt, job.num_blocks)
        self._refused.note(work, self.deployment.ttft_limit_s, self.clock.now)
        self._outcome.num_refused += 1
        self._num_open -= 1

    def _expected_ttft_s(self, job: Job) -> float:
        pods = self.prefill.usable
        if not pods:
            return math.inf
        s_per_token = self._pace().prefill_s_per_token
        tokens = sum(job.request.num_prompt for job in self._line)
        tokens += sum(int(pod.report().queued_blocks * BLOCK) for pod in pods)
        own_s = self.deployment.costs.prefill_s(job.request.num_prompt, 0)
        if own_s > self.deployment.ttft_limit_s:
            own_s = 0.0
        return tokens * s_per_token / len(pods) + own_s

    def _pump(self) -> None:
        """Lets go whoever may, in order."""
        while self._line:
            job = self._line[0]
            prefill = min(self.prefill.usable, key=_backlog, default=None)
            ahead = PREFILL_AHEAD_S / self._pace().prefill_s_per_token / BLOCK
            if prefill is None or _backlog(prefill) > ahead:
                self._waits_for = PREFILL
                return
            decode = max(self.decode.usable, key=_room, default=None)
            if decode is None or (_room(decode) < job.num_blocks and decode._jobs):
                self._waits_for = DECODE
                return
            self._line.popleft()
            job.decode = decode
            decode.assign(job)
            prefill.add(job)


class _Nowhere:
    """Where a job is that has no decode pod yet; nobody asks it anything."""

    holdings: Holdings

    def take_room(self, job: Job, retry: Callable[[], None]) -> bool:
        return False

    def run(self, job: Job) -> None: ...


_NOWHERE = _Nowhere()


def _backlog(pod: PrefillPod) -> float:
    return pod.report().queued_blocks


def _room(pod: DecodePod) -> float:
    return pod.report()[1]


def _prefill_load(pod: PrefillPod) -> types_pb2.Load:
    running = int(pod._current is not None)
    tokens = int(pod.report().queued_blocks * BLOCK)
    return types_pb2.Load(queue_depth=len(pod._queue), running=running, queued_tokens=tokens)


def _decode_load(pod: DecodePod) -> types_pb2.Load:
    work, _ = pod.report()
    blocks = types_pb2.BlockStats(referenced=int(work.context_blocks))
    return types_pb2.Load(running=int(work.sequences), blocks=blocks)
