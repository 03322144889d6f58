"""How much CPU time the processes under test took, and how much everybody else did.

On a machine that others use, a turn in which they were busy says little.
"""

from __future__ import annotations

import ctypes
import os
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


def cpu_s(pid: int) -> float:
    """CPU time that a process has taken so far with all of its threads, those that ended too.

    To the nanosecond, by the process's own clock (/proc counts ticks of 10 ms). Raises OSError
    when there is no such process.
    """
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, os.strerror(error), str(pid))
    return time.clock_gettime(clock.value)


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
