"""The sequences that wait for the batch, in the order in which they shall enter it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.sequence import Sequence, SequenceKey


class WaitingQueue:
    """Preempted sequences in order of arrival, then the others in order of arrival.

    The preempted come first: their clients have begun to read.
    """

    def __init__(self) -> None:
        self._preempted: dict[SequenceKey, Sequence] = {}
        self._fresh: dict[SequenceKey, Sequence] = {}

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted.values()
        yield from self._fresh.values()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._preempted or sequence.key in self._fresh

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    def add(self, sequence: Sequence) -> None:
        """Appends a sequence that has just arrived."""
        self._fresh[sequence.key] = sequence

    def add_preempted(self, sequence: Sequence) -> None:
        """Puts `sequence` back, before all that have never run."""
        others = self._preempted.values()
        in_order = sorted([*others, sequence], key=lambda waiting: waiting.arrival)
        self._preempted = {waiting.key: waiting for waiting in in_order}

    def remove(self, sequence: Sequence) -> None:
        queue = self._preempted if sequence.key in self._preempted else self._fresh
        del queue[sequence.key]
