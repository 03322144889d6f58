"""Things that are compared take turns: a machine whose speed wanders treats them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def in_turns(num_rounds: int, ways: Mapping[Key, Callable[[], T]]) -> dict[Key, list[T]]:
    """Runs every way once a round, every second round backwards. What each gave, by its key."""
    found: dict[Key, list[T]] = {name: [] for name in ways}
    order = list(ways.items())
    for _ in range(num_rounds):
        for name, run in order:
            found[name].append(run())
        order.reverse()
    return found


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' own ratios. Raises ValueError for numbers of rounds that differ."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def median_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' own differences, likewise."""
    return statistics.median(our - their for our, their in zip(ours, theirs, strict=True))
