"""Takes over, before a worker says that it is ready, the prefixes that are in use on another one.

A new worker has an empty prefix cache, so that the first prompts of every conversation and every
common beginning would be computed once more. The peer of the same role that holds most tells which
of its blocks were found in the cache lately; they are fetched as any prefix is. Whatever goes
wrong costs a bounded time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from baton.v1 import kv_transfer_pb2, types_pb2, worker_pb2
from core.errors import BatonError, TransferError
from core.logs import event
from core.rpc import pod_errors
from kvtransfer.peers import Peer
from worker.host import WorkerHost
from worker.prefix_reader import MAX_FETCH_S, MissingBlocks, PrefixReader

logger = logging.getLogger(__name__)

FETCH_BYTES = 64 << 20
"""Read at a time, so that a slow link gets something done in the time of one fetch."""


def sources(
    records: Iterable[types_pb2.WorkerRecord], own: types_pb2.WorkerRecord
) -> list[types_pb2.WorkerRecord]:
    """Ready workers with blocks that are of use to `own`; who holds most comes first."""
    fitting = [
        record
        for record in records
        if record.worker_id != own.worker_id
        and record.role == own.role
        and record.state == types_pb2.WORKER_STATE_READY
        and record.fingerprint == own.fingerprint
    ]
    return sorted(fitting, key=_num_held, reverse=True)


def _num_held(record: types_pb2.WorkerRecord) -> int:
    return record.load.blocks.cached + record.load.blocks.referenced


def chains(hashes: Sequence[bytes], parents: Sequence[int]) -> list[list[bytes]]:
    """Every path from a first block to a last one, in order of their last blocks.

    `parents[i]` is the place of the block before the i-th; -1 for a first block. Raises
    TransferError for what is no such tree.
    """
    if len(hashes) != len(parents) or not all(-1 <= p < i for i, p in enumerate(parents)):
        raise TransferError("the list of hot blocks is no tree")
    inner = set(parents)
    found = []
    for last in range(len(hashes)):
        if last in inner:
            continue
        path, place = [], last
        while place >= 0:
            path.append(hashes[place])
            place = parents[place]
        found.append(path[::-1])
    return found


class PrefixWarmer:
    """Fills one worker's prefix cache. `list_workers` tells whom there is to ask."""

    def __init__(
        self,
        host: WorkerHost,
        reader: PrefixReader,
        list_workers: Callable[[], Awaitable[list[types_pb2.WorkerRecord]]],
    ) -> None:
        self._host = host
        self._pool = host.engine.pool
        self._reader = reader
        self._list_workers = list_workers
        self._fetch_blocks = max(1, FETCH_BYTES // host.engine.kv_cache.block_bytes)

    async def run(self, max_blocks: int, timeout_s: float) -> None:
        """Takes up to `max_blocks`, in `timeout_s` at most. Raises no error."""
        began_at = self._host.clock()
        try:
            async with asyncio.timeout(timeout_s):
                await self._take_from_one(max_blocks)
        except (BatonError, TimeoutError) as error:
            event(logger, logging.WARNING, "not_warmed", error=str(error) or "too slow")
        num_blocks = self._pool.stats().cached
        duration_s = round(self._host.clock() - began_at, 2)
        event(logger, logging.INFO, "warmed", num_blocks=num_blocks, duration_s=duration_s)

    async def _take_from_one(self, max_blocks: int) -> None:
        """From the first source that does not fail, after those that did."""
        for record in sources(await self._list_workers(), self._host.record()):
            try:
                await self._take(record, max_blocks)
                return
            except (BatonError, TimeoutError) as error:
                reason = str(error) or "too slow"
                event(logger, logging.WARNING, "not_warmed", peer=record.worker_id, error=reason)

    async def _take(self, record: types_pb2.WorkerRecord, max_blocks: int) -> None:
        address = worker_pb2.WorkerAddress(
            worker_id=record.worker_id, address=record.address, epoch=record.epoch
        )
        async with asyncio.timeout(MAX_FETCH_S):
            peer = await self._host.peers.connected(address)
            hot = await self._hot_blocks(peer, max_blocks)
        if len(hot.block_hashes) > max_blocks:
            raise TransferError(f"{peer.worker_id} answered what was not asked")
        for chain in chains(hot.block_hashes, hot.parents):
            await self._fetch(chain, peer)

    async def _hot_blocks(self, peer: Peer, max_blocks: int) -> kv_transfer_pb2.HotBlocksReply:
        request = kv_transfer_pb2.HotBlocksRequest(source_epoch=peer.epoch, max_blocks=max_blocks)
        with pod_errors(peer.worker_id):
            reply: kv_transfer_pb2.HotBlocksReply = await peer.exports.ListHotBlocks(
                request, timeout=MAX_FETCH_S
            )
        return reply

    async def _fetch(self, chain: list[bytes], peer: Peer) -> None:
        """Piece by piece, as far as the peer still has it."""
        while (num_held := self._pool.match_length(chain)) < len(chain):
            piece = MissingBlocks(chain[: num_held + self._fetch_blocks], num_held)
            async with asyncio.timeout(MAX_FETCH_S):
                num_blocks = await self._reader.copy(piece, peer)
            if num_blocks == 0:
                return
