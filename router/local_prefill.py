"""Up to how many uncached tokens decode computes a prompt itself instead of having it handed off.

Prefill computes them at its own pace and hands over; decode computes them in small chunks
between the tokens of its running sequences, so each takes longer there the busier it is:

    s_prefill * n + handoff  =  s_decode * n      at   n = handoff / (s_decode - s_prefill)

Below that n the request itself is served sooner on decode, and what its neighbours lose is
bounded by the size of a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

MIN_TOKENS = 64
"""So short a prompt always stays: its second token comes sooner even beside running sequences
(`bench.local_prefill`), and decode's pace stays known."""
MAX_TOKENS = 512
"""More never stays, however slow a hand-off is: it would take from decode too long."""
START_TOKENS = 128
"""The usual begin: about what `bench.local_prefill` finds on idle workers."""
NUM_REMEMBERED = 128
"""Hand-offs that count. Each figure is a median: the time of a hand-off has a long tail, and the
speeds differ little and change with what a step happens to hold."""
MIN_REMEMBERED = 8


class LocalPrefillLimit:
    """The limit in tokens: `fixed`, or else learned, from `start` on."""

    def __init__(self, fixed: int | None, start: int = START_TOKENS) -> None:
        self._fixed = fixed
        self._handoffs_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._losses_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        """What a token took longer on decode, as each hand-off was observed."""
        self._loss_s: float | None = None
        self._learned = float(start)

    def observe_handoff(self, seconds: float) -> None:
        """From prefill's first token until decode has taken over, as the router saw it."""
        if self._loss_s is None:
            return
        self._handoffs_s.append(seconds)
        self._losses_s.append(self._loss_s)
        if len(self._losses_s) >= MIN_REMEMBERED:
            self._learned = _limit(median(self._handoffs_s), median(self._losses_s))

    def max_tokens(self, prefill_s: Sequence[float], decode_s: Sequence[float]) -> float:
        """The limit, given what a prompt token takes each worker that has told."""
        if self._fixed is not None:
            return self._fixed
        if prefill_s and decode_s:
            self._loss_s = median(decode_s) - median(prefill_s)
        return self._learned


def _limit(handoff_s: float, loss_s: float) -> float:
    if loss_s * MAX_TOKENS <= handoff_s:
        return MAX_TOKENS
    return max(MIN_TOKENS, handoff_s / loss_s)
