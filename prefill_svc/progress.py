"""What steps did for one prompt, and the announcements that follow from it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kvtransfer.base import BlockPart
from worker.first_tokens import FirstToken


@dataclass(frozen=True)
class Progress:
    """After a step, or a part of one: `end` blocks of the table are final in `num_layers`."""

    end: int
    num_layers: int
    first_tokens: tuple[FirstToken, ...] = ()
    """Of every choice; the step that brings them is the prompt's last."""
    error: Exception | None = None


class ProgressQueue:
    """Progress on its way from the engine loop to the request's task."""

    def __init__(self) -> None:
        self._items: deque[Progress] = deque()
        self._changed = asyncio.Event()

    def put(self, progress: Progress) -> None:
        """More layers of the same blocks take the place of what was not read yet.

        A chunk that completes no block has nothing to say before its end.
        """
        last = self._items[-1] if self._items else None
        if last is not None and progress.error is None and last.end == progress.end:
            if progress.num_layers < last.num_layers:
                return
            self._items.pop()
        self._items.append(progress)
        self._changed.set()

    async def get(self) -> Progress:
        """Waits for the next one."""
        while not self._items:
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


@dataclass(frozen=True)
class Piece:
    """One announcement: blocks [first, end) of the table, whole or a group of their layers."""

    sequence: int
    first: int
    end: int
    part: BlockPart | None


class Pieces:
    """Cuts progress into announcements without a gap. `num_held` blocks decode has already."""

    def __init__(self, num_held: int, num_layers: int, block_bytes: int) -> None:
        self._next_block = num_held
        self._num_layers = num_layers
        self._layer_bytes = block_bytes // num_layers
        self._layers_done = 0
        self._sequence = 0

    def due(self, progress: Progress) -> Piece | None:
        """What can be announced now; None when decode would learn nothing."""
        is_last = bool(progress.first_tokens)
        if progress.end <= self._next_block and not is_last:
            return None
        begin, layers = self._layers_done, progress.num_layers
        part = None
        if (begin, layers) != (0, self._num_layers) and progress.end > self._next_block:
            part = BlockPart(begin * self._layer_bytes, (layers - begin) * self._layer_bytes)
        end = max(progress.end, self._next_block)
        piece = Piece(self._sequence, self._next_block, end, part)
        self._sequence += 1
        self._layers_done = layers % self._num_layers
        if self._layers_done == 0:
            self._next_block = end
        return piece
