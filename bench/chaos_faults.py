"""What went wrong with the pods, and how long it took until they were of use again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bench.chaos_load import COMPLETED, Result
from bench.pods import Pod

KILL_ROUTER = "kill router"
RECONNECT_S = 3.0
"""A client's channel finds a router that is back within its longest backoff, 2 s and a fifth;
until then gRPC itself answers each call with the last refusal."""


@dataclass(eq=False)
class Fault:
    """One thing that went wrong. Times are of time.monotonic."""

    kind: str
    pods: tuple[Pod, ...]
    at: float
    undone_at: float | None = None
    """When the process was there again: continued, or started."""
    served_at: float | None = None
    """End of the first good answer to a request that began after the fault."""
    back_at: float | None = None
    """End of the first good answer in which this pod had a part, after `undone_at`."""
    over_at: float | None = None
    """When every pod was usable again."""
    is_followed: bool = False
    """Whether another fault hit one of the pods before it was back."""

    def note(self, result: Result, ended_at: float) -> None:
        """Looks at a completed request."""
        if self.served_at is None and result.started_at >= self.at:
            self.served_at = ended_at
        if self.back_at is None and self.undone_at is not None and not self.is_followed:
            has_part = any(pod.name in result.workers for pod in self.pods)
            if has_part and result.started_at >= self.undone_at:
                self.back_at = ended_at

    @property
    def outage_s(self) -> float | None:
        return None if self.served_at is None else self.served_at - self.at

    @property
    def return_s(self) -> float | None:
        if self.back_at is None or self.undone_at is None:
            return None
        return self.back_at - self.undone_at


@dataclass
class Faults:
    """Everything that has gone wrong so far."""

    done: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Pods that ended by themselves, or did not end or start when they were told to."""

    def add(self, fault: Fault) -> None:
        """A fault begins."""
        for earlier in self.done:
            earlier.is_followed |= bool({*earlier.pods} & {*fault.pods})
        self.done.append(fault)

    def on_result(self, result: Result) -> None:
        """Takes every result, to see when things work again."""
        if result.outcome == COMPLETED:
            now = time.monotonic()
            for fault in self.done:
                if fault.served_at is None or fault.back_at is None:
                    fault.note(result, now)

    def was_router_away(self, since: float) -> bool:
        """Whether it was, for its clients, at any time from `since` on."""
        return any(
            fault.kind == KILL_ROUTER
            and (fault.over_at is None or fault.over_at + RECONNECT_S >= since)
            for fault in self.done
        )
