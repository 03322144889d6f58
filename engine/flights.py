"""The steps on the device: one, or two when the next is planned ahead.

While a step is on the device, `Scheduler.schedule_ahead` plans the one after it, so that the
device need not wait for the bookkeeping in between:

    schedule() -> step 1                           on the device: 1
    schedule_ahead() -> step 2                                    1, and 2 behind it
    postprocess(1), schedule_ahead() -> step 3                    2, 3
    postprocess(2), schedule_ahead() -> None                      3
    postprocess(3), schedule() -> step 4                          4

It assumes that every decoding sequence goes on with the token that the step on the device yields.
The token is not known yet; the runner, which has it, puts it in. What this means:

- A sequence that is sure to end with that token, by its limits, is not in the step ahead. One
  that ends otherwise (an end or stop token, an abort, logits that are not finite) is in it for
  nothing, and its result is dropped.
- Blocks of a sequence that goes while it is in flight are *parked*: released when the steps on the
  device are over, which may still write to them.
- A step ahead takes no blocks away from anybody. Where the decodes need more than there are, the
  next step is planned when the result is known, with preemptions as ever.
- Nor is there one where the next choice needs the last token on the host (penalties), or where no
  sequence goes on from one step to the next. Then there is nothing to gain, and a prompt that
  comes meanwhile would wait for one step more. So workers that only compute prompts, and their
  hand-off by layers, see one step at a time.
- Prompts ride along in a step ahead as in any other: all their tokens are known.
- The copy of a shared block is made by the first step that writes to it, and the source released
  after that step; blocks become findable by their hash when the step that fills them is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.batch import ScheduledSequence, StepBatch
from engine.block_pool import BlockPool
from engine.sequence import Sequence


@dataclass(frozen=True)
class _Flight:
    batch: StepBatch
    parked: list[int] = field(default_factory=list)
    """References to release when the step is over."""


class Flights:
    """What is on the device, oldest first, and the blocks of those who have left meanwhile."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, items: list[ScheduledSequence]) -> StepBatch:
        """One step more."""
        for item in items:
            item.sequence.num_scheduled_tokens = item.start + item.num_tokens
        batch = StepBatch(tuple(items))
        self._flights.append(_Flight(batch))
        return batch

    def end(self, batch: StepBatch) -> None:
        """The oldest is over, and with it what was parked until then."""
        assert self._flights and batch is self._flights[0].batch, "not the step on the device"
        self._pool.release(self._flights.popleft().parked)

    def release(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Releases what a sequence held, at once or when no step writes to it any more."""
        if sequence.is_in_flight:
            self._flights[-1].parked.extend(block_ids)
        else:
            self._pool.release(block_ids)

    def audit(self, sequences: Iterable[Sequence]) -> list[str]:
        """One line for each broken rule, given all sequences that are not over."""
        in_flight = {item.sequence for flight in self._flights for item in flight.batch.sequences}
        errors = [
            f"{sequence.key}: its tokens on the device are not those scheduled"
            for sequence in sequences
            if sequence.is_in_flight != (sequence in in_flight)
        ]
        for flight in self._flights:
            errors += [
                f"block {block_id}: free, and a step on the device may write to it"
                for block_id in flight.parked
                if self._pool.num_references(block_id) == 0
            ]
        return errors
