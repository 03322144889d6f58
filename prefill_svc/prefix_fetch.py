"""Decides which prefixes are fetched from other workers, and for how long a prompt waits.

A prompt comes with the name of a worker that seems to hold more of it than this one. Fetching
that hides behind the wait for decode's grant and behind the prompts ahead. Whatever goes wrong
costs a bounded time and nothing else: the prompt is computed then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import worker_pb2
from core.errors import BatonError
from core.logs import event
from engine.sequence import Sequence
from kvtransfer.link import LinkEstimate
from worker.host import WorkerHost
from worker.prefix_reader import MAX_FETCH_S, MissingBlocks, PrefixReader

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
"""A source that has failed, or was too slow, is left alone for so long."""
_CONTROL_S = 2e-3
"""Asking and releasing: two short messages to another pod and back."""


def is_cheaper(num_bytes: int, link: LinkEstimate, compute_s: float) -> bool:
    """Whether to fetch so many bytes, which would take `compute_s` to compute.

    What is not known yet (0) speaks for it: fetching is how the link's speed is learned.
    """
    if compute_s <= 0 or link.bytes_per_s <= 0:
        return True
    return _CONTROL_S + link.read_s(num_bytes) < compute_s


@dataclass(eq=False)
class _Fetch:
    task: asyncio.Task[None]
    num_waiting: int = 0


class PrefixFetcher:
    """Fetches for the prompts of one prefill worker, each prefix once at a time.

    `expected_s` says how long so many tokens take to compute, 0 if that is not known.
    """

    def __init__(
        self, host: WorkerHost, reader: PrefixReader, expected_s: Callable[[int], float]
    ) -> None:
        self._host = host
        self._pool = host.engine.pool
        self._reader = reader
        self._expected_s = expected_s
        self._running: dict[bytes, _Fetch] = {}
        """By the first hash that each brings."""
        self._paused_until: dict[str, float] = {}
        """By worker id."""

    async def bring(self, sequence: Sequence, source: worker_pb2.PrefixSource) -> None:
        """Returns when what `source` holds of a new sequence, which has its hashes, is cached here.

        Also when that has failed, or takes longer than to compute it. Raises no error.
        """
        # The newest token is always computed, into a block of its own.
        num_usable = (sequence.num_tokens - 1) // self._pool.block_size
        hashes = sequence.block_hashes[: max(0, min(source.num_blocks, num_usable))]
        compute_s = self._compute_s(len(hashes) - self._pool.match_length(hashes))
        try:
            async with asyncio.timeout(min(MAX_FETCH_S, compute_s or MAX_FETCH_S)):
                await self._bring(hashes, source.worker)
        except TimeoutError:
            self._pause(source.worker.worker_id, "too slow")

    def _compute_s(self, num_blocks: int) -> float:
        return self._expected_s(num_blocks * self._pool.block_size)

    async def _bring(self, hashes: list[bytes], source: worker_pb2.WorkerAddress) -> None:
        """As long as that gets further: another prompt's fetch may bring a part of it."""
        before, num_held = -1, self._pool.match_length(hashes)
        while before < num_held < len(hashes):
            if self._host.clock() < self._paused_until.get(source.worker_id, 0.0):
                return
            await self._join(MissingBlocks(hashes, num_held), source)
            before, num_held = num_held, self._pool.match_length(hashes)

    async def _join(self, missing: MissingBlocks, source: worker_pb2.WorkerAddress) -> None:
        """Waits for the fetch that brings the first of them, whoever has begun it.

        It ends early when nobody waits for it any more.
        """
        name = missing.hashes[missing.first]
        fetch = self._running.get(name)
        if fetch is None:
            task = self._host.tasks.start(self._fetch(missing, source))
            task.add_done_callback(lambda _: self._running.pop(name))
            fetch = self._running[name] = _Fetch(task)
        fetch.num_waiting += 1
        try:
            await asyncio.wait({fetch.task})
        finally:
            fetch.num_waiting -= 1
            if fetch.num_waiting == 0:
                fetch.task.cancel()

    async def _fetch(self, missing: MissingBlocks, source: worker_pb2.WorkerAddress) -> None:
        began_at = self._host.clock()
        try:
            async with asyncio.timeout(MAX_FETCH_S):
                num_blocks = await self._copy(missing, source)
        except (BatonError, TimeoutError) as error:
            self._pause(source.worker_id, error)
            return
        event(
            logger,
            logging.DEBUG,
            "prefix_fetched",
            source=source.worker_id,
            num_blocks=num_blocks,
            duration_s=self._host.clock() - began_at,
        )

    async def _copy(self, missing: MissingBlocks, source: worker_pb2.WorkerAddress) -> int:
        """The number of blocks that came. Raises a BatonError."""
        num_blocks = min(missing.num_blocks, self._reader.num_free)
        num_bytes = num_blocks * self._host.engine.kv_cache.block_bytes
        peer = await self._host.peers.get(source)
        compute_s = self._compute_s(num_blocks)
        if num_blocks == 0 or not is_cheaper(num_bytes, peer.link.estimate(), compute_s):
            return 0
        return await self._reader.copy(missing, await self._host.peers.connected(source))

    def _pause(self, worker_id: str, reason: object) -> None:
        event(logger, logging.INFO, "prefix_not_fetched", source=worker_id, reason=reason)
        now = self._host.clock()
        others = {name: until for name, until in self._paused_until.items() if until > now}
        self._paused_until = {**others, worker_id: now + PAUSE_S}
