"""Up to how many uncached tokens decode computes a prompt itself instead of having it handed off.

Prefill computes them at its own pace and hands over; decode computes them in small chunks
between the tokens of its running sequences, so each takes longer there the busier it is:

    s_prefill * n + handoff  =  s_decode * n      at   n = handoff / (s_decode - s_prefill)

Below that n the request itself is served sooner on decode, and what its neighbours lose is
bounded by the size of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MIN_TOKENS = 64
"""So short a prompt always stays: its second token comes sooner even beside running sequences
(`bench.local_prefill`), and decode's pace stays known."""
MAX_TOKENS = 512
"""More never stays, however slow a hand-off is: it would take from decode too long."""
START_TOKENS = 128
"""Until all three figures are known: about what `bench.local_prefill` finds on idle workers."""
_WEIGHT = 0.1


class LocalPrefillLimit:
    """The limit in tokens: `fixed`, or else learned."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._handoff_s: float | None = None

    def observe_handoff(self, seconds: float) -> None:
        """From prefill's first token until decode has taken over, as the router saw it."""
        known = self._handoff_s
        self._handoff_s = seconds if known is None else known + _WEIGHT * (seconds - known)

    def max_tokens(self, prefill_s: Sequence[float], decode_s: Sequence[float]) -> float:
        """The limit, given what a prompt token takes each worker that has told."""
        if self._fixed is not None:
            return self._fixed
        if self._handoff_s is None or not prefill_s or not decode_s:
            return START_TOKENS
        lost_s = median(decode_s) - median(prefill_s)
        if lost_s * MAX_TOKENS <= self._handoff_s:
            return MAX_TOKENS
        return max(MIN_TOKENS, self._handoff_s / lost_s)
