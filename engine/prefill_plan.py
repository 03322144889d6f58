"""How one step's prefill tokens are divided between the sequences being prefilled."""

from __future__ import annotations

from engine.batch import ScheduledSequence
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence


def num_remaining(sequence: Sequence) -> int:
    """Known tokens that no step has computed or will; 0 where one is to yield the next token."""
    return sequence.num_tokens - sequence.num_scheduled_tokens


class PrefillPlan:
    """Divides `budget` tokens.

    Short prefills are served first, in the order of `add`. Each long one is sure of
    `budget / max_num_partial_prefills` and takes what the short ones leave over besides: a
    long prompt neither blocks short ones nor starves behind them. Long ones beyond
    `max_long_partial_prefills` get nothing: all would end later if they shared.
    """

    def __init__(self, config: SchedulerConfig, budget: int) -> None:
        self._config = config
        self._budget = budget
        self._num_left = budget
        self._num_partial_shorts = 0
        self._chunks: list[ScheduledSequence] = []
        self._longs: list[Sequence] = []

    @property
    def admits_more(self) -> bool:
        """Whether a further sequence may get tokens in this step."""
        num_partial = len(self._longs) + self._num_partial_shorts
        return num_partial < self._config.max_num_partial_prefills and self._num_open > 0

    def takes(self, num_tokens: int) -> bool:
        """Whether a sequence with so many uncomputed tokens need not wait for a long one."""
        return (
            not self._is_long(num_tokens)
            or len(self._longs) < self._config.max_long_partial_prefills
        )

    def add(self, sequence: Sequence) -> None:
        """Gives `sequence` a part of the step; it may turn out empty."""
        wanted = num_remaining(sequence)
        if not self.takes(wanted):
            return
        if self._is_long(wanted):
            self._longs.append(sequence)
            return
        num_tokens = min(wanted, self._num_open)
        self._give(sequence, num_tokens)
        if num_tokens < wanted:
            self._num_partial_shorts += 1

    def chunks(self) -> list[ScheduledSequence]:
        """The step's prefills. Called once, after the last `add`."""
        for num_waiting, sequence in zip(range(len(self._longs), 0, -1), self._longs, strict=True):
            self._give(sequence, min(num_remaining(sequence), self._num_left // num_waiting))
        return self._chunks

    @property
    def _num_open(self) -> int:
        """Tokens that a short prefill may take now; the longs' shares are rounded up."""
        num_shared = len(self._longs) * self._budget
        share = -(-num_shared // self._config.max_num_partial_prefills)
        return max(0, self._num_left - share)

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._config.long_prefill_token_threshold

    def _give(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        start = sequence.num_scheduled_tokens
        self._chunks.append(ScheduledSequence.of(sequence, start, num_tokens))
        self._num_left -= num_tokens
