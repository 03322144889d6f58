"""How much CPU time the processes under test took, and how much everybody else did.

On a machine that others use, a turn in which they were busy says little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class CpuMeter:
    """Since `start`. Children of this process are under test; those that end are not counted."""

    began_at: float
    children_s: float
    busy_s: float

    @classmethod
    def start(cls) -> CpuMeter:
        return cls(time.perf_counter(), _children_s(), _busy_s())

    def own_cores(self) -> float:
        """Cores that the children kept busy, in the mean."""
        return (_children_s() - self.children_s) / self._elapsed_s()

    def other_cores(self) -> float:
        """Cores that all others kept busy, this process among them."""
        return max(0.0, (_busy_s() - self.busy_s) / self._elapsed_s() - self.own_cores())

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.began_at


def _children_s() -> float:
    taken = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        taken += times.user + times.system
    return taken


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
