"""The line before the workers: fair between classes and tenants, by priority within one.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels: of the classes
that have a share, then of a class's tenants, the one goes next that has had the least work
for its share. A class without a share goes when no other waits. Who was idle comes back at
the present virtual time, so that nobody saves up a claim. Pure bookkeeping.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from router.tenants import ClassName, Tenant

_RECENT_STEP = 0.05
_MIN_PACE = 0.01


@dataclass(eq=False)
class Waiting:
    """One request in line. `cost`: all its tokens, with those of the output that is expected;
    `need_blocks`: on decode."""

    tenant: Tenant
    cost: int
    num_prompt_tokens: int = 0
    need_blocks: int = 0
    priority: int = 0
    is_gone: bool = False


class _Flow:
    """A tenant's own line."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.virtual = 0.0
        self.costs: Counter[int] = Counter()
        """By priority."""
        self.num_waiting = 0
        self._heap: list[tuple[int, int, Waiting]] = []

    def push(self, item: Waiting, number: int) -> None:
        heapq.heappush(self._heap, (-item.priority, number, item))
        self.costs[item.priority] += item.cost
        self.num_waiting += 1

    def forget(self, item: Waiting) -> None:
        item.is_gone = True
        self.costs[item.priority] -= item.cost
        self.num_waiting -= 1

    def head(self) -> Waiting:
        """The next; only while somebody waits."""
        while self._heap[0][2].is_gone:
            heapq.heappop(self._heap)
        return self._heap[0][2]


@dataclass
class _ClassLine:
    """The lines of a class's tenants."""

    share: float = 0.0
    virtual: float = 0.0
    clock: float = 0.0
    """Virtual time among its tenants."""
    flows: dict[str, _Flow] = field(default_factory=dict)
    num_waiting: int = 0
    cost: int = 0

    def waiting_flows(self) -> dict[str, _Flow]:
        return {name: flow for name, flow in self.flows.items() if flow.num_waiting}


class FairQueue:
    """Requests that wait. The caller takes `head` and, when it may go, `pop`s it."""

    def __init__(self) -> None:
        self._classes: dict[ClassName, _ClassLine] = {}
        self._clock = 0.0
        self._numbers = itertools.count()
        self._recent: defaultdict[ClassName, float] = defaultdict(float)
        """Which part of those that went lately were a class's."""
        self.num_waiting = 0
        self.num_prompt_tokens = 0
        self.need_blocks = 0
        """Like the two above it, of all that wait."""

    def num_waiting_of(self, tenant: Tenant) -> int:
        line = self._classes.get(tenant.class_name)
        flow = line.flows.get(tenant.name) if line else None
        return flow.num_waiting if flow else 0

    def counts(self) -> dict[ClassName, tuple[int, int]]:
        """Requests and tokens that wait, of each class that waits."""
        return {
            name: (line.num_waiting, line.cost)
            for name, line in self._classes.items()
            if line.num_waiting
        }

    def push(self, item: Waiting) -> None:
        """Puts `item` at its place: after those of its tenant with its priority or a higher."""
        tenant = item.tenant
        line = self._classes.setdefault(tenant.class_name, _ClassLine())
        line.share = tenant.service_class.share
        if not line.num_waiting:
            line.virtual = max(line.virtual, self._clock)
        flow = line.flows.setdefault(tenant.name, _Flow())
        flow.weight = tenant.weight
        if not flow.num_waiting:
            flow.virtual = max(flow.virtual, line.clock)
        flow.push(item, next(self._numbers))
        self._count(line, item, 1)

    def head(self) -> Waiting | None:
        """Who goes next."""
        return self._choose()[1].head() if self.num_waiting else None

    def pop(self) -> Waiting:
        """Takes the head out, and charges its tenant and class for it."""
        line, flow = self._choose()
        item = flow.head()
        self._clock = max(self._clock, line.virtual)
        line.clock = max(line.clock, flow.virtual)
        line.virtual += item.cost / (line.share or 1.0)
        flow.virtual += item.cost / flow.weight
        for name in self._recent:
            self._recent[name] *= 1.0 - _RECENT_STEP
        self._recent[item.tenant.class_name] += _RECENT_STEP
        self._forget(item, line, flow)
        return item

    def remove(self, item: Waiting) -> None:
        """Takes out one that gave up waiting. It must be in line."""
        line = self._classes[item.tenant.class_name]
        self._forget(item, line, line.flows[item.tenant.name])

    def work_ahead(self, tenant: Tenant, priority: int, cost: int) -> float:
        """What is likely to go before a new request of `tenant`, as a multiple of all that waits.

        Its own line goes on at the pace that its class is guaranteed among those that wait, or
        had lately if that is more; others, who come later too, get the rest meanwhile. Without
        a share it also waits for all that wait with one.
        """
        if not self.num_waiting:
            return 0.0
        line = self._classes.get(tenant.class_name) or _ClassLine()
        flow = line.flows.get(tenant.name) or _Flow()
        own = sum(amount for level, amount in flow.costs.items() if level >= priority)
        others = [other for other in self._classes.values() if other.num_waiting]
        rivals = sum(other.cost for other in others if other.share > 0 and other is not line)
        share = tenant.service_class.share
        shares = sum(other.share for other in others if other is not line)
        guaranteed = share / (share + shares) if share else float(not rivals)
        pace = max(guaranteed, self._recent[tenant.class_name], _MIN_PACE)
        flows = line.waiting_flows()
        weights = sum(other.weight for name, other in flows.items() if name != tenant.name)
        pace *= tenant.weight / (tenant.weight + weights)
        ahead = (own + cost) / pace - cost
        return (ahead if share else ahead + rivals) / sum(other.cost for other in others)

    def _choose(self) -> tuple[_ClassLine, _Flow]:
        assert self.num_waiting, "nobody waits"
        lines = [line for line in self._classes.values() if line.num_waiting]
        with_share = [line for line in lines if line.share > 0]
        line = min(with_share or lines, key=lambda line: line.virtual)
        return line, min(line.waiting_flows().values(), key=lambda flow: flow.virtual)

    def _forget(self, item: Waiting, line: _ClassLine, flow: _Flow) -> None:
        flow.forget(item)
        self._count(line, item, -1)
        if not self.num_waiting:
            # Nobody is behind anybody any more.
            self._classes.clear()
            self._clock = 0.0

    def _count(self, line: _ClassLine, item: Waiting, sign: int) -> None:
        line.num_waiting += sign
        line.cost += sign * item.cost
        self.num_waiting += sign
        self.num_prompt_tokens += sign * item.num_prompt_tokens
        self.need_blocks += sign * item.need_blocks
