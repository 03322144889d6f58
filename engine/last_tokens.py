"""The tokens that the last step yielded, on the device: what a step planned ahead goes on from."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.batch import ScheduledSequence, StepResult
from engine.sequence import Sequence
from engine.step_inputs import AwaitedTokens, on_device


class LastTokens:
    """Belongs to the device thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[Sequence, int] = {}
        self._token_ids = torch.empty(0, dtype=torch.int32, device=device)

    def keep(self, items: Rows[ScheduledSequence], token_ids: torch.Tensor) -> None:
        """`token_ids`, on the device, are those that follow `items`; negative where none does."""
        self._rows = {item.sequence: row for row, item in enumerate(items)}
        self._token_ids = token_ids

    def keep_result(self, items: Rows[ScheduledSequence], result: StepResult) -> None:
        """The same of a step whose result is with the host."""
        numbers = [-1 if token is None else token.token_id for token in result.tokens]
        self.keep(items, on_device(torch.tensor(numbers, dtype=torch.int32), self._device))

    def awaited(self, items: Rows[ScheduledSequence]) -> AwaitedTokens | None:
        """What `items` lack, their tokens lying one after the other; None when that is nothing.

        A sequence whose last step failed gets token 0: what follows from it is dropped.
        """
        rows, sources, row = [], [], 0
        for item in items:
            if item.awaits_token and item.sequence in self._rows:
                rows.append(row)
                sources.append(self._rows[item.sequence])
            row += item.num_tokens
        if not rows:
            return None
        index = on_device(torch.tensor([rows, sources]), self._device)
        return AwaitedTokens(index[0], self._token_ids[index[1]].clamp(min=0).long())
