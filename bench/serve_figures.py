"""What became of a load's requests, and the figures that are read out of it. Pure.

TTFT counts from when a request was due, not from when it was sent: a client that is late hides
nothing. ITL is the gap between consecutive messages with output, and TPOT a request's
(last output - first output) / (tokens - 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.report import Field, quantile

_QUANTILES = (50, 90, 99)


@dataclass
class Record:
    """One request as its client saw it. Times in seconds from the load's start."""

    due_s: float
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """Of each message with output."""
    num_tokens: int = 0
    is_complete: bool = False
    error: str | None = None
    """What kind of failure it was, if one."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    def gaps_s(self, begin_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Between messages, of those whose later one came in the interval."""
        return [b - a for a, b in pairwise(self.arrivals_s) if begin_s <= b < end_s]


@dataclass(frozen=True)
class Slo:
    """Most milliseconds that a good answer takes; None: as many as it likes."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, record: Record) -> bool:
        """Whether the request was served, and in time."""
        if not record.is_complete or not record.arrivals_s:
            return False
        if self.ttft_ms is not None and record.ttft_s * 1e3 > self.ttft_ms:
            return False
        tpot_s = record.tpot_s
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms


@dataclass(frozen=True)
class Window:
    """The part of a load that counts, in seconds from its start; what precedes is warm-up."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


def figures(records: Sequence[Record], window: Window, slo: Slo) -> dict[str, Field]:
    """Latencies and goodput of the requests that were due in `window`, and what the server got
    done in that time, whenever it was due."""
    due = [record for record in records if window.holds(record.due_s)]
    served = [record for record in due if record.is_complete and record.arrivals_s]
    num_ended = sum(r.is_complete and window.holds(r.arrivals_s[-1]) for r in records)
    good = sum(slo.is_met(record) for record in due)
    tpots = [record.tpot_s for record in served]
    fields: dict[str, Field] = {
        "requests": len(due),
        "served": len(served),
        "offered_per_s": len(due) / window.seconds,
        "served_per_s": num_ended / window.seconds,
        "output_tokens_per_s": sum(_tokens_in(r, window) for r in records) / window.seconds,
        "goodput_per_s": good / window.seconds,
        "good": good / len(due) if due else None,
    }
    for name, values in (
        ("ttft", [record.ttft_s for record in served]),
        ("itl", [gap for record in served for gap in record.gaps_s()]),
        ("tpot", [tpot for tpot in tpots if tpot is not None]),
        ("sent_late", [record.sent_s - record.due_s for record in due]),
    ):
        fields |= quantiles_ms(name, values)
    counts = Counter(record.error for record in due if record.error is not None)
    return fields | {f"error: {kind}": count for kind, count in sorted(counts.items())}


def quantiles_ms(name: str, values_s: Sequence[float]) -> dict[str, Field]:
    """`name`_p50_ms and so on; None of nothing, which JSON can say."""
    return {
        f"{name}_p{q}_ms": quantile(values_s, q / 100) * 1e3 if values_s else None
        for q in _QUANTILES
    }


def _tokens_in(record: Record, window: Window) -> float:
    """Tokens that came in the window; messages of one answer count for equally many."""
    if not record.arrivals_s:
        return 0.0
    share = sum(map(window.holds, record.arrivals_s)) / len(record.arrivals_s)
    return record.num_tokens * share
