"""Blocks for new requests: first come, first served, whether their KV comes from prefill or not.

A request gets what its known tokens need, less what the prefix cache holds. Some blocks stay
free for the sequences that are running (the watermark), and while a preempted sequence waits
for its blocks nothing new is let in: its turn comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import TransferError
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceKey
from kvtransfer.imports import ImportTable

Take = Callable[[list[int], list[int]], object]
"""Becomes the owner of blocks: those that the cache provided, and new ones."""


@dataclass(eq=False)
class _Place:
    """One request's place in the line."""

    sequence: Sequence
    num_reusable: int
    """Leading blocks that may come from the cache."""
    take: Take
    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    num_asking: int = 0


class Room:
    """The line of requests that wait for blocks."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, imports: ImportTable) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._imports = imports
        self._waiting: dict[SequenceKey, _Place] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, sequence: Sequence) -> None:
        """Waits until the sequence has an import in the table, which then owns its blocks.

        Several callers may wait for one sequence; its place in the line is lost when all of
        them have been cancelled. Raises CancelledError after `withdraw`, and TransferError
        when its import has ended: a late repetition of the question.
        """
        if self._imports.has_ended(sequence.key):
            raise TransferError(f"{sequence.key[0]} attempt {sequence.key[1]} had its room")
        if self._imports.get(sequence.key) is not None:
            return
        await self._wait(
            sequence,
            len(sequence.block_hashes),
            lambda held, fresh: self._imports.grant(sequence.key, held, fresh),
        )

    async def take_local(self, sequence: Sequence, take: Take) -> None:
        """Waits in the same line for a sequence that is computed here.

        `take` is called at the moment of the grant, so that the blocks have an owner at once.
        At least the newest token's block is new. Raises CancelledError after `withdraw`.
        """
        num_reusable = (sequence.num_tokens - 1) // self._pool.block_size
        await self._wait(sequence, num_reusable, take)

    async def _wait(self, sequence: Sequence, num_reusable: int, take: Take) -> None:
        place = self._waiting.get(sequence.key)
        if place is None:
            place = self._waiting[sequence.key] = _Place(sequence, num_reusable, take)
            self.update()
        place.num_asking += 1
        try:
            await asyncio.shield(place.granted)
        finally:
            place.num_asking -= 1
            if place.num_asking == 0 and self._waiting.get(sequence.key) is place:
                self.withdraw(sequence.key)

    def withdraw(self, key: SequenceKey) -> None:
        """Nobody wants this room any more; nothing for an unknown key."""
        place = self._waiting.pop(key, None)
        if place is not None:
            place.granted.cancel()
            self.update()

    def update(self) -> None:
        """Grants from the head of the line; called whenever room may have become free."""
        while self._waiting and self._scheduler.num_preempted == 0:
            key = next(iter(self._waiting))
            place = self._waiting[key]
            if not self._grant(place):
                return
            del self._waiting[key]
            place.granted.set_result(None)

    def _grant(self, place: _Place) -> bool:
        sequence = place.sequence
        num_blocks = -(-sequence.num_tokens // self._pool.block_size)
        held = self._pool.match_prefix(sequence.block_hashes[: place.num_reusable])
        # One block for its own growth and one for each running sequence's. Without any of
        # them the whole pool is free, and a request as large as the pool must get in.
        is_alone = self._scheduler.num_running == 0 and self._imports.num_open == 0
        watermark = 0 if is_alone else 1 + self._scheduler.num_running
        fresh = self._pool.reserve(held, num_blocks - len(held), spare=watermark)
        if fresh is None:
            return False
        place.take(held, fresh)
        return True
