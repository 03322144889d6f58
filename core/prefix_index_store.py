"""The prefix index as Redis keeps it: two keys, and what may be done with them.

    baton:{index}:blocks   HASH  first 8 bytes of a block's hash → bitmap of the slots that hold it
    baton:{index}:slots    HASH  slot <n> → "<worker> <epoch> <generation> <number of batches>"
                                 seen <n> → time of the last batch
                                 dead <n> → what slot <n> was
                                 version  → another one whenever a slot changes hands

A *slot* stands for one life of a worker, or for the time between two losses of events in it.
Both hashes have a field `index`, equal while they belong together. Half of a block's hash halves
what a lookup sends; two of a billion blocks have one key with a probability of 3 %, and then a
worker may be credited with a block that it does not hold.

Blocks are fields of one hash and not keys of their own, since that takes less memory (no object
header), lets scripts find them by a blob of hashes on a Redis Cluster, too (only the two keys
are declared; both have one hash tag, so one shard has the index), and gives all of it one time
to live: when nobody has written for an hour, both keys expire.

Every method is one script, atomic and one round trip. All raise Unavailable.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from core.redis_client import RedisClient, redis_errors

_BLOCKS_KEY = "baton:{index}:blocks"
_SLOTS_KEY = "baton:{index}:slots"
_TTL_S = 3600
MAX_LOOKUP_KEYS = 1024
"""Receiving keys is most of what a long prompt's lookup costs: more of them are not sent."""
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


@dataclass(frozen=True)
class SlotTable:
    """The slots of (worker id, epoch), as of one version."""

    version: bytes
    slots: Mapping[tuple[str, int], int]

    @classmethod
    def parse(cls, entries: Mapping[bytes, bytes]) -> SlotTable:
        """Of the fields of the hash; an empty one has the version b""."""
        slots = {}
        for name, stamp in entries.items():
            kind, _, slot = name.partition(b" ")
            if kind == b"slot":
                worker_id, epoch, *_ = stamp.split(b" ")
                slots[worker_id.decode(), int(epoch)] = int(slot)
        return cls(entries.get(b"version", b""), slots)


class IndexStore:
    """The scripts of the index."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
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
        stored = _keys([block_hash for block_hash, is_stored in batch.items() if is_stored])
        removed = _keys([block_hash for block_hash, is_stored in batch.items() if not is_stored])
        with redis_errors():
            return bool(
                await self._write(
                    keys=[_BLOCKS_KEY, _SLOTS_KEY],
                    args=[slot, str(life), *numbers, _TTL_S, stored, removed],
                )
            )

    async def slots(self) -> SlotTable:
        """Whose each slot is now."""
        with redis_errors():
            return SlotTable.parse(cast(dict[bytes, bytes], await self._redis.hgetall(_SLOTS_KEY)))

    async def lookup(
        self, version: bytes, prompts: Sequence[Sequence[bytes]], slots: Iterable[int]
    ) -> list[dict[int, int]] | None:
        """How many leading blocks of each of `prompts` each of `slots` holds; those with none are
        left out.

        Exact up to 1,024 blocks. Of more, only every second (third, …) is asked for, and the last:
        a count may then be too small, by less than one in 1,024.
        None when the slot table has another version: the slots may be others' now.
        """
        asked = sum(1 << slot for slot in slots)
        num_words = max(1, -(-asked.bit_length() // 32))
        blobs = [_keys(_probed(hashes)) for hashes in prompts]
        with redis_errors():
            found: list[list[Any]] | None = await self._lookup(
                keys=[_BLOCKS_KEY, _SLOTS_KEY],
                args=[version, asked.to_bytes(4 * num_words, "little"), *blobs],
            )
        if found is None:
            return None
        return [_counts(changes, hashes) for changes, hashes in zip(found, prompts, strict=True)]

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


def _keys(hashes: Sequence[bytes]) -> bytes:
    """The first half of each 16-byte hash."""
    return array("Q", b"".join(hashes))[::2].tobytes()


def _stride(num_blocks: int) -> int:
    return max(1, -(-num_blocks // MAX_LOOKUP_KEYS))


def _probed(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Those of a prompt that are asked for."""
    stride = _stride(len(hashes))
    if stride == 1:
        return hashes
    probed = list(hashes[stride - 1 :: stride])
    if len(hashes) % stride:
        probed.append(hashes[-1])
    return probed


def _counts(changes: Sequence[Any], hashes: Sequence[bytes]) -> dict[int, int]:
    """Slot → number of leading blocks, out of (position, bitmap of its holders) pairs."""
    stride, num_blocks = _stride(len(hashes)), len(hashes)
    ordered = sorted(zip(changes[::2], changes[1::2], strict=True))
    positions = [position for position, _ in ordered]
    holders = [int.from_bytes(bitmap, "little") for _, bitmap in ordered]
    counts: dict[int, int] = {}
    for position, before, after in zip(positions, holders, [*holders, 0][1:], strict=True):
        ending = before & ~after
        while ending:
            lowest = ending & -ending
            counts.setdefault(lowest.bit_length() - 1, min(position * stride, num_blocks))
            ending ^= lowest
    return counts


def _script(redis: RedisClient, name: str) -> Any:
    # redis-py's AsyncScript has no types worth the name.
    parts = [resources.files("core") / f"prefix_index_{part}.lua" for part in ("bits", name)]
    return redis.register_script("\n".join(part.read_text(encoding="utf-8") for part in parts))
