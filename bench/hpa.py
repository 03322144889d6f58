"""The arithmetic of Kubernetes' HorizontalPodAutoscaler (autoscaling/v2), without Kubernetes.

What its controller does every 15 s, after its documentation: a wish from each metric, the
largest of them, stabilized over a window, and held to the rates of `behavior`. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SYNC_S = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True)
class Rate:
    """So many pods, or percent of them, in so many seconds."""

    kind: Literal["pods", "percent"]
    value: int
    period_s: float


@dataclass(frozen=True)
class Rules:
    """One direction of `behavior`: the widest of the rates counts."""

    rates: tuple[Rate, ...]
    window_s: float = 0.0


@dataclass(frozen=True)
class Behavior:
    """As in an HPA's spec."""

    min_replicas: int
    max_replicas: int
    up: Rules
    down: Rules


DEFAULT_UP = Rules((Rate("pods", 4, 15.0), Rate("percent", 100, 15.0)))
DEFAULT_DOWN = Rules((Rate("percent", 100, 15.0),), window_s=300.0)


def wish_of_total(total: float, target: float, current: int) -> int:
    """For an external metric with an AverageValue: `ceil(total / target)` outside the tolerance."""
    ratio = total / (target * current) if current else math.inf
    if abs(ratio - 1.0) <= TOLERANCE:
        return current
    return math.ceil(total / target)


def wish_of_utilization(utilization: float, target: float, current: int) -> int:
    """For a resource such as CPU, whose mean over the pods is `utilization`."""
    ratio = utilization / target
    if abs(ratio - 1.0) <= TOLERANCE:
        return current
    return math.ceil(current * ratio)


@dataclass(frozen=True)
class Change:
    """One decision that changed the number of replicas."""

    at_s: float
    before: int
    after: int

    @property
    def direction(self) -> int:
        return 1 if self.after > self.before else -1


class Autoscaler:
    """One HPA. `decide` in every round; None stands for a metric that is not available."""

    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior
        self._wishes: deque[tuple[float, int]] = deque()
        self.changes: list[Change] = []

    def decide(self, wishes: Sequence[int | None], current: int, now: float) -> int:
        """How many replicas there shall be."""
        known = [wish for wish in wishes if wish is not None]
        if not known:
            return current
        wish = max(known)
        if len(known) < len(wishes) and wish < current:
            # What is not known might ask for more.
            return current
        wanted = self._limited(self._stabilized(wish, current, now), current, now)
        if wanted != current:
            self.changes.append(Change(now, current, wanted))
        return wanted

    def _stabilized(self, wish: int, current: int, now: float) -> int:
        up, down = self._behavior.up, self._behavior.down
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - max(up.window_s, down.window_s):
            self._wishes.popleft()
        lowest = min(w for at, w in self._wishes if at >= now - up.window_s)
        highest = max(w for at, w in self._wishes if at >= now - down.window_s)
        return min(max(current, lowest), highest)

    def _limited(self, wanted: int, current: int, now: float) -> int:
        behavior = self._behavior
        wanted = min(max(wanted, behavior.min_replicas), behavior.max_replicas)
        if wanted > current:
            limits = [self._bound(rate, 1, current, now) for rate in behavior.up.rates]
            return max(current, min(wanted, max(limits)))
        if wanted < current:
            limits = [self._bound(rate, -1, current, now) for rate in behavior.down.rates]
            return min(current, max(wanted, min(limits)))
        return current

    def _bound(self, rate: Rate, direction: int, current: int, now: float) -> int:
        """How far one rate lets it go from where its period began."""
        recent = [change for change in self.changes if change.at_s > now - rate.period_s]
        start = current - sum(change.after - change.before for change in recent)
        if rate.kind == "pods":
            return start + direction * rate.value
        share = start * (1 + direction * rate.value / 100)
        return math.ceil(share) if direction > 0 else int(share)


def num_oscillations(changes: Sequence[Change], window_s: float) -> int:
    """How often the direction changed a second time within `window_s`."""
    turns = [
        later.at_s
        for earlier, later in itertools.pairwise(changes)
        if later.direction != earlier.direction
    ]
    return sum(b - a < window_s for a, b in itertools.pairwise(turns))
