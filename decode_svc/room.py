"""Blocks for new requests: first come, first served, whether their KV comes from prefill or not.

A request gets what its known tokens need, less what the prefix cache holds, and copies of the
last block for its choices. Some blocks stay free for the sequences that are running (the
watermark), and while a preempted sequence waits for its blocks nothing new is let in: its turn
comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import TransferError
from engine.block_pool import BlockPool
from engine.fork import num_copies
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from kvtransfer.imports import ImportKey, ImportTable

Take = Callable[[list[int], list[int], list[int]], object]
"""Becomes the owner of blocks: those that the cache provided, new ones, and spare ones."""


@dataclass(eq=False)
class _Claim:
    """One prompt's place in the line."""

    prompt: Sequence
    num_choices: int
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
        self._waiting: dict[ImportKey, _Claim] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, key: ImportKey) -> bool:
        return key in self._waiting

    async def take(self, prompt: Sequence, num_choices: int = 1) -> None:
        """Waits until the prompt has an import in the table, which then owns its blocks.

        Its `spare` blocks are for copies of the last one, which the choices cannot share.
        Several callers may wait for one prompt; its place in the line is lost when all of them
        have been cancelled. Raises CancelledError after `withdraw`, and TransferError when its
        import has ended: a late repetition of the question.
        """
        key = prompt.request_key
        if self._imports.has_ended(key):
            raise TransferError(f"{key[0]} attempt {key[1]} had its room")
        if self._imports.get(key) is not None:
            return
        await self._wait(
            _Claim(
                prompt,
                num_choices,
                len(prompt.block_hashes),
                lambda held, fresh, spare: self._imports.grant(key, held, fresh, spare=spare),
            )
        )

    async def take_local(
        self, sequence: Sequence, take: Callable[[list[int], list[int]], object]
    ) -> None:
        """Waits in the same line for a sequence that is computed here.

        `take` is called at the moment of the grant, so that the blocks have an owner at once.
        At least the newest token's block is new. Raises CancelledError after `withdraw`.
        """
        num_reusable = (sequence.num_tokens - 1) // self._pool.block_size
        await self._wait(
            _Claim(sequence, 1, num_reusable, lambda held, fresh, _: take(held, fresh))
        )

    async def _wait(self, asked: _Claim) -> None:
        key = asked.prompt.request_key
        claim = self._waiting.get(key)
        if claim is None:
            claim = self._waiting[key] = asked
            self.update()
        claim.num_asking += 1
        try:
            await asyncio.shield(claim.granted)
        finally:
            claim.num_asking -= 1
            if claim.num_asking == 0 and self._waiting.get(key) is claim:
                self.withdraw(key)

    def withdraw(self, key: ImportKey) -> None:
        """Nobody wants this room any more; nothing for an unknown key."""
        claim = self._waiting.pop(key, None)
        if claim is not None:
            claim.granted.cancel()
            self.update()

    def update(self) -> None:
        """Grants from the head of the line; called whenever room may have become free."""
        while self._waiting and self._scheduler.num_preempted == 0:
            key = next(iter(self._waiting))
            claim = self._waiting[key]
            if not self._grant(claim):
                return
            del self._waiting[key]
            claim.granted.set_result(None)

    def _grant(self, claim: _Claim) -> bool:
        size, num_tokens = self._pool.block_size, claim.prompt.num_tokens
        num_blocks = -(-num_tokens // size)
        # Choices for which the whole pool is too small are computed again, like preempted ones.
        num_spare = min(
            num_copies(num_tokens, claim.num_choices, size), self._pool.num_blocks - num_blocks
        )
        held = self._pool.match_prefix(claim.prompt.block_hashes[: claim.num_reusable])
        # One block for each choice's growth and one for each running sequence's. Without any
        # of them the whole pool is free, and a request as large as the pool must get in.
        is_alone = self._scheduler.num_running == 0 and self._imports.num_open == 0
        watermark = 0 if is_alone else claim.num_choices + self._scheduler.num_running
        num_fresh = num_blocks - len(held)
        blocks = self._pool.reserve(held, num_fresh + num_spare, spare=watermark)
        if blocks is None:
            return False
        claim.take(held, blocks[:num_fresh], blocks[num_fresh:])
        return True
