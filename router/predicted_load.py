"""What routers have sent to one worker and that worker's reports do not tell yet.

A dispatch counts from when it is sent until a report says that it tells of it. Without reports
it counts until its end, its prompt until it is computed. What other routers have sent counts from
when they tell (`load_exchange`) until the next report or their next word.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.routing import Work


class PredictedLoad:
    """Of one worker in one life. A dispatch goes by its `stream_id`."""

    def __init__(self) -> None:
        self._sent: dict[int, Work] = {}
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

    def add(self, stream_id: int, work: Work) -> None:
        """A dispatch is about to be sent."""
        self.remove(stream_id)
        self._sent[stream_id] = work
        self._change(work, 1)

    def reported(self, accepted: Iterable[int]) -> None:
        """A report has come that tells, from now on, of the `accepted` dispatches."""
        self.others = Work()
        for stream_id in accepted:
            self.remove(stream_id)

    def prefilled(self, stream_id: int) -> None:
        """Its first token is there: nothing of its prompt waits any more."""
        work = self._sent.get(stream_id)
        if work is not None:
            self._change(Work(queued_blocks=work.queued_blocks), -1)
            work.queued_blocks = 0.0

    def remove(self, stream_id: int) -> None:
        """It is over. Nothing for an unknown one."""
        work = self._sent.pop(stream_id, None)
        if work is None:
            return
        self._change(work, -1)
        if not self._sent:
            # Sums of floats leave crumbs.
            self.own = Work()

    def _change(self, work: Work, sign: int) -> None:
        self.own.queued_blocks += sign * work.queued_blocks
        self.own.sequences += sign * work.sequences
        self.own.context_blocks += sign * work.context_blocks
