"""What a link between two pods can do, learned from the reads that went over it.

A read of x bytes takes about `overhead_s + x / bytes_per_s`. Both numbers come from a least
squares line through recent reads, older ones counting less and less.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95
_MIN_WEIGHT = 2.0
"""Reads, weighted by age, before there is an estimate."""
_DEFAULT_OVERHEAD_S = 1e-3


@dataclass(frozen=True)
class LinkEstimate:
    """Speed of a link; `bytes_per_s` is 0 as long as nothing is known."""

    bytes_per_s: float = 0.0
    overhead_s: float = _DEFAULT_OVERHEAD_S
    """Time of a read beyond its bytes: announcement, request, completion."""

    def read_s(self, num_bytes: float) -> float:
        """How long a read of `num_bytes` takes."""
        return self.overhead_s + num_bytes / self.bytes_per_s


class LinkMeter:
    """Turns observed reads into an estimate."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One finished read."""
        self._n = self._n * _DECAY + 1
        self._x = self._x * _DECAY + num_bytes
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + num_bytes**2
        self._xy = self._xy * _DECAY + num_bytes * seconds

    def estimate(self) -> LinkEstimate:
        """The line through what was observed; without an own slope, through the mean."""
        if self._n < _MIN_WEIGHT or self._x == 0:
            return LinkEstimate()
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        slope = 0.0
        if spread > (0.1 * mean_x) ** 2:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
        overhead_s = mean_y - slope * mean_x
        if slope <= 0 or overhead_s < 0:
            overhead_s = min(_DEFAULT_OVERHEAD_S, mean_y / 2)
            slope = (mean_y - overhead_s) / mean_x
        return LinkEstimate(1 / slope, overhead_s)
