"""Which workers a request goes to: a pure decision over what is known of each.

The cost is counted in KV blocks. For prefill: blocks that it must compute (the prompt less
the prefix that it holds) plus blocks of prompts that wait there already. So among equally
loaded workers the longest held prefix wins, and a prefix is worth as much waiting as it
saves work. For decode: blocks that it must pull plus a charge for every sequence that it
has, since each slows every step.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

SEQUENCE_COST_BLOCKS = 8
"""A sequence in decode's batch counts as much as so many blocks to pull."""


@dataclass(frozen=True)
class PrefillView:
    """What the router knows of a prefill worker. All counts in blocks."""

    worker_id: str
    held_blocks: int
    reported_blocks: float | None
    """Prompt blocks queued there by its last report; None when that is too old."""
    predicted_blocks: float
    """What this router has sent since that report."""


@dataclass(frozen=True)
class DecodeView:
    """What the router knows of a decode worker."""

    worker_id: str
    held_blocks: int
    reported_sequences: float | None
    """Running and waiting there by its last report; None when that is too old."""
    predicted_sequences: float
    """What this router has sent since that report."""
    free_blocks: int | None
    """Blocks that a new sequence could take; None when unknown."""


def choose_prefill(
    views: Sequence[PrefillView],
    num_blocks: int,
    rng: random.Random,
    avoid: Collection[str] = (),
) -> str | None:
    """Worker with the least cost for a prompt of `num_blocks`; None when there is none.

    Equal costs go to the longer prefix, then to chance. Workers in `avoid` come last.
    """
    assumed = _assumed([view.reported_blocks for view in views])
    costs = {}
    for view in views:
        reported = assumed if view.reported_blocks is None else view.reported_blocks
        queued = reported + view.predicted_blocks
        missing = max(0, num_blocks - view.held_blocks)
        costs[view.worker_id] = (view.worker_id in avoid, missing + queued, -view.held_blocks)
    return _least(costs, rng)


def choose_decode(
    views: Sequence[DecodeView],
    num_blocks: int,
    rng: random.Random,
    avoid: Collection[str] = (),
) -> str | None:
    """Worker with the least cost for a sequence that needs `num_blocks`; None without one.

    Workers known to lack the room come after those that have it; equal costs go to the one
    with more free blocks, then to chance. Workers in `avoid` come last.
    """
    assumed = _assumed([view.reported_sequences for view in views])
    assumed_free = _assumed([view.free_blocks for view in views])
    costs = {}
    for view in views:
        reported = assumed if view.reported_sequences is None else view.reported_sequences
        num_sequences = reported + view.predicted_sequences
        missing = max(0, num_blocks - view.held_blocks)
        lacks_room = view.free_blocks is not None and view.free_blocks < missing
        costs[view.worker_id] = (
            view.worker_id in avoid,
            lacks_room,
            missing + SEQUENCE_COST_BLOCKS * num_sequences,
            -(assumed_free if view.free_blocks is None else view.free_blocks),
        )
    return _least(costs, rng)


def _assumed(reports: Sequence[float | None]) -> float:
    """Load of a worker whose report is too old: that of a middling one, neither idle nor full."""
    known = [report for report in reports if report is not None]
    return median(known) if known else 0.0


_Cost = TypeVar("_Cost", bound=tuple[float, ...])


def _least(costs: dict[str, _Cost], rng: random.Random) -> str | None:
    if not costs:
        return None
    least = min(costs.values())
    return rng.choice([worker_id for worker_id, cost in costs.items() if cost == least])
