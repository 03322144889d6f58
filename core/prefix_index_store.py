"""The prefix index as Redis keeps it: two keys, and what may be done with them.

    baton:{index}:blocks   HASH  block hash (16 bytes) → bitmap of the slots that hold the block
    baton:{index}:slots    HASH  life <worker> <epoch> → slot      (lookups)
                                 slot <n> → <worker> <epoch> <generation> <number of batches>
                                 seen <n> → time of the last batch, dead <n> → former stamp

A *slot* stands for one life of a worker, or for the time between two losses of events in it.
Blocks are fields of one hash and not keys of their own, since that takes less memory (no object
header), lets scripts find them by a blob of hashes on a Redis Cluster, too (only the two keys
are declared; both have one hash tag, so one shard has the index), and gives all of it one time
to live: when nobody has written for an hour, both keys expire.

Every method is one script, atomic and one round trip. All raise Unavailable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from core.redis_client import RedisClient, redis_errors

_BLOCKS_KEY = "baton:{index}:blocks"
_SLOTS_KEY = "baton:{index}:slots"
_TTL_S = 3600
SLOT_LEASE_S = 60
"""A slot is retired when its worker has been silent for so long."""
SCRUB_INTERVAL_S = 60
"""Least time between two scrubs, whoever makes them."""


@dataclass(frozen=True)
class Life:
    """Whom a slot is given to. Epochs count a worker's lives, generations the slots in one."""

    worker_id: str
    epoch: int
    generation: int

    def __str__(self) -> str:
        return f"{self.worker_id} {self.epoch} {self.generation}"


class IndexStore:
    """The scripts of the index."""

    def __init__(self, redis: RedisClient) -> None:
        self._begin = _script(redis, "begin")
        self._write = _script(redis, "write")
        self._lookup = _script(redis, "lookup")
        self._tend = _script(redis, "tend")
        self._scrub = _script(redis, "scrub")

    async def begin(self, life: Life) -> int | None:
        """A clean slot for `life`; the slot that the worker had is retired.

        None when a later life of the worker has one.
        """
        with redis_errors():
            slot = int(
                await self._begin(
                    keys=[_BLOCKS_KEY, _SLOTS_KEY],
                    args=[life.worker_id, life.epoch, life.generation, _TTL_S],
                )
            )
        return None if slot < 0 else slot

    async def write(
        self, slot: int, life: Life, numbers: tuple[int, int], batch: Mapping[bytes, bool]
    ) -> bool:
        """Applies a batch: block hash → whether the block is stored now.

        `numbers`: of the last batch that is known to have arrived, and of this one. False, and
        nothing has changed, when the slot is not `life`'s or Redis lacks an earlier batch.
        """
        stored = b"".join(block_hash for block_hash, is_stored in batch.items() if is_stored)
        removed = b"".join(block_hash for block_hash, is_stored in batch.items() if not is_stored)
        with redis_errors():
            return bool(
                await self._write(
                    keys=[_BLOCKS_KEY, _SLOTS_KEY],
                    args=[slot, str(life), *numbers, _TTL_S, stored, removed],
                )
            )

    async def lookup(self, hashes: Sequence[bytes], candidates: Mapping[str, int]) -> list[int]:
        """For each candidate (worker id → epoch) how many leading blocks of `hashes` it holds."""
        lives = [f"life {worker_id} {epoch}" for worker_id, epoch in candidates.items()]
        with redis_errors():
            counts: list[int] = await self._lookup(
                keys=[_BLOCKS_KEY, _SLOTS_KEY], args=[b"".join(hashes), *lives]
            )
        return counts

    async def tend(self) -> list[bytes]:
        """Retires the slots of silent workers. Returns the retired slots, as `scrub` takes them,
        when it is the caller's turn to scrub them."""
        with redis_errors():
            retired: list[bytes] = await self._tend(
                keys=[_SLOTS_KEY], args=[SLOT_LEASE_S, SCRUB_INTERVAL_S]
            )
        return retired

    async def scrub(self, cursor: bytes, retired: Sequence[bytes]) -> bytes:
        """Clears the bits of `retired` in some 500 blocks. Begin with the cursor b"0"; when
        b"0" comes back, all is done and the slots are free."""
        with redis_errors():
            next_cursor: bytes = await self._scrub(
                keys=[_BLOCKS_KEY, _SLOTS_KEY], args=[cursor, *retired]
            )
        return next_cursor


def _script(redis: RedisClient, name: str) -> Any:
    # redis-py's AsyncScript has no types worth the name.
    parts = [resources.files("core") / f"prefix_index_{part}.lua" for part in ("bits", name)]
    return redis.register_script("\n".join(part.read_text(encoding="utf-8") for part in parts))
