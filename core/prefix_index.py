"""Prefix index: which worker holds which KV block. Workers write, the router reads.

`core/prefix_index_store.py` says how Redis keeps it. A block takes about 65 bytes, whoever and
however many hold it, and about 1/8 byte more for each worker beyond 112 (`python -m bench.index`).

A lookup counts only candidates by (worker id, epoch), so a former life's entries fall away at
once. Whatever may have made Redis miss an event (it was flushed, has old contents, lost its
last writes in a failover, was away for too long) makes the writer begin again in a clean slot;
the old one is retired, and scrubbed before anyone gets it. Removal needs no expiry: a worker
holds a bounded number of blocks and reports what it drops.

An answer is a hint that the worker confirms.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.batching import Batcher
from core.errors import Unavailable
from core.logs import event
from core.prefix_index_store import IndexStore, Life, SlotTable
from core.redis_client import RedisClient

logger = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 0.05
_IDLE_CHECK_S = 5.0
_RETRY_S = 1.0
_TEND_INTERVAL_S = 20.0
_BATCH_BLOCKS = 4096
_NUM_TRIES = 4
_MAX_BUFFERED_BLOCKS = 1 << 18
_MAX_BLOCKS_AT_ONCE = 4096
"""Of all prompts that one lookup asks about: Redis serves nobody else meanwhile."""


class PrefixIndexWriter:
    """Publishes one worker's cached blocks. `record` never blocks; `run` does the writing.

    `holdings` returns the hashes of all blocks in the cache now; it is called whenever Redis
    has to be told everything again.
    """

    def __init__(
        self, redis: RedisClient, worker_id: str, epoch: int, holdings: Callable[[], list[bytes]]
    ) -> None:
        self._store = IndexStore(redis)
        self._life = Life(worker_id, epoch, 0)
        self._holdings = holdings
        self._slot = 0
        self._num_arrived = 0
        self._num_sent = 0
        self._is_stored: dict[bytes, bool] = {}
        self._wake = asyncio.Event()
        self._must_republish = True

    def record(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Notes hashes that the cache dropped and then those that it took in."""
        for block_hash in removed:
            self._is_stored[block_hash] = False
        for block_hash in stored:
            self._is_stored[block_hash] = True
        if len(self._is_stored) > _MAX_BUFFERED_BLOCKS:
            self._is_stored.clear()
            self._must_republish = True
        if self._is_stored or self._must_republish:
            self._wake.set()

    async def run(self) -> None:
        """Writes, and helps to keep the index clean, until cancelled.

        Outlives every failure of Redis.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            tasks.create_task(self._tend())

    async def _publish(self) -> None:
        is_away = False
        while True:
            try:
                if self._must_republish:
                    await self._republish()
                await self._flush()
            except Unavailable as error:
                if not is_away:
                    event(logger, logging.WARNING, "prefix_index_away", error=error.message)
                is_away = True
                await asyncio.sleep(_RETRY_S)
                continue
            if is_away:
                event(logger, logging.INFO, "prefix_index_back", worker_id=self._life.worker_id)
            is_away = False
            if not self._must_republish:
                await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        """Returns after the next event, or when it is time to look whether Redis still knows."""
        try:
            async with asyncio.timeout(_IDLE_CHECK_S):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_FLUSH_INTERVAL_S)

    async def _flush(self) -> None:
        """Writes what is buffered; with nothing buffered it only keeps the slot."""
        self._wake.clear()
        while not self._must_republish:
            batch = dict(itertools.islice(self._is_stored.items(), _BATCH_BLOCKS))
            for block_hash in batch:
                del self._is_stored[block_hash]
            try:
                is_known = await self._write(batch)
            except Unavailable:
                # Every entry states the latest truth about a block, so writing it a second
                # time does no harm; what was recorded meanwhile is newer.
                self._is_stored = batch | self._is_stored
                raise
            self._must_republish = self._must_republish or not is_known
            if not self._is_stored:
                return

    async def _republish(self) -> None:
        """Begins a generation, in a slot of its own, and writes all holdings in batches."""
        self._life = Life(self._life.worker_id, self._life.epoch, self._life.generation + 1)
        slot = await self._store.begin(self._life)
        if slot is None:
            raise Unavailable(f"a later life of {self._life.worker_id} writes the prefix index")
        self._slot, self._num_arrived, self._num_sent = slot, 0, 0
        self._must_republish = False
        self._is_stored.clear()
        held = self._holdings()
        try:
            for start in range(0, len(held), _BATCH_BLOCKS):
                # What was recorded since `holdings` is newer and flushed afterwards.
                if not await self._write(dict.fromkeys(held[start : start + _BATCH_BLOCKS], True)):
                    self._must_republish = True
                    return
        except Unavailable:
            self._must_republish = True
            raise

    async def _write(self, batch: Mapping[bytes, bool]) -> bool:
        # A batch without an answer may have arrived or not, so the next one names both.
        self._num_sent += 1
        numbers = (self._num_arrived, self._num_sent)
        is_known = await self._store.write(self._slot, self._life, numbers, batch)
        self._num_arrived = self._num_sent
        return is_known

    async def _tend(self) -> None:
        """Now and then retires the slots of workers that are gone, and scrubs retired ones."""
        while True:
            await asyncio.sleep(_TEND_INTERVAL_S)
            try:
                retired = await self._store.tend()
                cursor = b"0"
                while retired:
                    cursor = await self._store.scrub(cursor, retired)
                    if cursor == b"0":
                        num_slots = len(retired) // 2
                        event(logger, logging.INFO, "prefix_index_scrubbed", num_slots=num_slots)
                        break
            except Unavailable:
                pass  # `_publish` reports it; whoever is next begins again


@dataclass(frozen=True)
class _Question:
    hashes: Sequence[bytes]
    candidates: Mapping[str, int]


class PrefixIndexReader:
    """Asks the index. One round trip for a prompt of any length, and for all that are asked
    about while another is under way."""

    def __init__(self, redis: RedisClient) -> None:
        self._store = IndexStore(redis)
        self._table = SlotTable(b"", {})
        self._batcher = Batcher(
            self._ask, cost=lambda question: len(question.hashes), max_cost=_MAX_BLOCKS_AT_ONCE
        )

    async def lookup(
        self, hashes: Sequence[bytes], candidates: Mapping[str, int]
    ) -> dict[str, int]:
        """Number of leading blocks of `hashes` that each candidate (worker id -> epoch) holds.

        Entries of another epoch do not count. Raises Unavailable; callers go on without.
        """
        if not hashes or not candidates:
            return dict.fromkeys(candidates, 0)
        return await self._batcher.answer(_Question(hashes, candidates))

    async def _ask(self, questions: Sequence[_Question]) -> list[dict[str, int]]:
        prompts = [question.hashes for question in questions]
        lives = {life for question in questions for life in question.candidates.items()}
        for _ in range(_NUM_TRIES):
            slots = {life: slot for life, slot in self._table.slots.items() if life in lives}
            counts = await self._store.lookup(self._table.version, prompts, slots.values())
            if counts is not None:
                return [
                    {life[0]: count.get(slots.get(life, -1), 0) for life in item.candidates.items()}
                    for item, count in zip(questions, counts, strict=True)
                ]
            self._table = await self._store.slots()
        raise Unavailable("the prefix index changes too fast")
