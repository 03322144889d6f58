"""What routers have sent to one worker and that worker's reports do not tell yet.

A dispatch counts from when it is sent. A report that comes after the worker has acknowledged
it knows of it, so that it counts there from then on. Without reports it counts until its end,
its prompt until it is computed. What other routers have sent counts from when they tell
(`load_exchange`) until the next report or their next word.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.routing import Work

DispatchKey = tuple[str, int]
"""(request id as workers know it, attempt)."""


@dataclass(slots=True)
class _Sent:
    work: Work
    is_acknowledged: bool = False


class PredictedLoad:
    """Of one worker in one life. Every operation but `reported` takes constant time."""

    def __init__(self) -> None:
        self._sent: dict[DispatchKey, _Sent] = {}
        self.own = Work()
        """What this router has sent."""
        self.others = Work()
        """What other routers have sent."""

    @property
    def total(self) -> Work:
        """Of all routers."""
        own, others = self.own, self.others
        return Work(
            own.queued_blocks + others.queued_blocks,
            own.sequences + others.sequences,
            own.context_blocks + others.context_blocks,
        )

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, key: DispatchKey, work: Work) -> None:
        """A dispatch is about to be sent."""
        self.remove(key)
        self._sent[key] = _Sent(work)
        self._change(work, 1)

    def acknowledge(self, key: DispatchKey) -> None:
        """The worker has it."""
        sent = self._sent.get(key)
        if sent is not None:
            sent.is_acknowledged = True

    def reported(self) -> None:
        """A report has come: what it knows of counts there."""
        self.others = Work()
        for key in [key for key, sent in self._sent.items() if sent.is_acknowledged]:
            self.remove(key)

    def prefilled(self, key: DispatchKey) -> None:
        """Its first token is there: nothing of its prompt waits any more."""
        sent = self._sent.get(key)
        if sent is not None:
            self._change(Work(queued_blocks=sent.work.queued_blocks), -1)
            sent.work.queued_blocks = 0.0

    def remove(self, key: DispatchKey) -> None:
        """It is over. Nothing for an unknown key."""
        sent = self._sent.pop(key, None)
        if sent is None:
            return
        self._change(sent.work, -1)
        if not self._sent:
            # Sums of floats leave crumbs.
            self.own = Work()

    def _change(self, work: Work, sign: int) -> None:
        self.own.queued_blocks += sign * work.queued_blocks
        self.own.sequences += sign * work.sequences
        self.own.context_blocks += sign * work.context_blocks
