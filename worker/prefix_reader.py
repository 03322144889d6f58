"""Copies cached blocks of another worker into this one's prefix cache.

    Fetch (pins the blocks there) → read → verify → Release (did the lease hold?) → cached here

Meanwhile the blocks belong to an import, as decode's do, under the same rules: a copy whose lease
was over before the read is thrown away, and where a read was given up nobody may write until it
has settled. There is no renewal, since a fetch is over before any lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import kv_transfer_pb2
from core.errors import BatonError, TransferError
from core.logs import event
from core.rpc import pod_errors
from kvtransfer.base import BlockCopy, BlockPart
from kvtransfer.digests import DigestPlan
from kvtransfer.imports import LEASE_OVER, Announcement, Import, ImportKey, ImportTable, PoolActions
from kvtransfer.peers import Peer
from worker.block_reader import BlockReader
from worker.host import WorkerHost

logger = logging.getLogger(__name__)

MAX_FETCH_S = 2.0
"""No fetch takes longer."""
MAX_FETCHED_SHARE = 0.25
"""Of the pool, being read at a time: prompts that are computed need room, too."""


@dataclass(frozen=True)
class MissingBlocks:
    """Those of a prompt from index `first` on; `hashes` are of its blocks from 0 on."""

    hashes: list[bytes]
    first: int

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) - self.first


class PrefixReader:
    """Reads for one worker. `on_room`: blocks have become free, or cached."""

    def __init__(self, host: WorkerHost, on_room: Callable[[], None]) -> None:
        pool = host.engine.pool
        self._host = host
        self._pool = pool
        self._on_room = on_room
        self._imports = ImportTable(
            MAX_FETCH_S,
            host.engine.kv_cache.block_bytes,
            host.clock,
            PoolActions(pool.release, pool.quarantine, pool.settle),
        )
        self._blocks = BlockReader(host, self._imports, on_room)
        self._max_blocks = int(MAX_FETCHED_SHARE * pool.num_blocks)

    @property
    def num_open(self) -> int:
        """Copies that hold blocks here, also those whose read was given up and has not settled."""
        return self._imports.num_open

    @property
    def num_free(self) -> int:
        """Blocks that may be read to now."""
        return max(0, self._max_blocks - self._imports.num_fresh_blocks)

    async def copy(self, missing: MissingBlocks, peer: Peer) -> int:
        """Copies what `peer`, which is connected, has of them; says how many those are.

        Raises a BatonError. Whatever happens, everything is freed, here and there.
        """
        identity = self._host.identity
        key = (f"{identity.worker_id}@{identity.epoch}/{next(self._host.fetch_numbers)}", 0)
        plan = self._host.settings.digest_plan()
        release = kv_transfer_pb2.ReleaseRequest(request_id=key[0], attempt=key[1])
        must_release = True
        try:
            reply = await self._ask(key, missing, peer, plan)
            must_release = len(reply.block_ids) > 0
            copies = self._reserve(key, missing, reply)
            if not copies:
                return 0
            await self._read(key, peer, copies)
            damaged = await self._first_damaged(plan, reply, copies)
            if damaged is not None:
                release.first_damaged_block = damaged
                raise TransferError(f"block {damaged} of a prefix did not arrive as it is")
            self._imports.begin_release(key)
            answer: kv_transfer_pb2.ReleaseReply = await peer.tell(peer.exports.Release, release)
            must_release = False
            entry = self._imports.commit(key, answer.lease_held)
            if entry is None:
                raise TransferError(LEASE_OVER)
            self._keep(entry, missing.hashes)
            return len(copies)
        finally:
            self._imports.abort(key)
            self._on_room()
            if must_release:
                self._host.tasks.start(self._give_up(peer, release))

    async def _ask(
        self, key: ImportKey, missing: MissingBlocks, peer: Peer, plan: DigestPlan
    ) -> kv_transfer_pb2.FetchReply:
        request = kv_transfer_pb2.FetchRequest(
            request_id=key[0],
            attempt=key[1],
            source_epoch=peer.epoch,
            block_hashes=missing.hashes[missing.first :][: self.num_free],
            digest_every=plan.every,
            digest_offset=plan.offset,
        )
        # Said once: who asks again may pin the blocks for a reader that has gone.
        with pod_errors(peer.worker_id):
            reply: kv_transfer_pb2.FetchReply = await peer.exports.Fetch(
                request, timeout=MAX_FETCH_S
            )
        num_verified = len(plan.indices(0, len(reply.block_ids)))
        if len(reply.block_ids) > missing.num_blocks or len(reply.digests) != num_verified:
            raise TransferError(f"{peer.worker_id} answered what was not asked")
        return reply

    def _reserve(
        self, key: ImportKey, missing: MissingBlocks, reply: kv_transfer_pb2.FetchReply
    ) -> list[BlockCopy] | None:
        """What to read, into blocks of a new import; None without room.

        None also when the cache has changed during the question, so that the first of them is
        not the one that follows what is held.
        """
        held = self._pool.match_prefix(missing.hashes)
        sources = reply.block_ids[: self.num_free]
        if not sources or len(held) != missing.first:
            return None
        # The blocks before them must not be evicted meanwhile: what is held is prefix-closed.
        fresh = self._pool.reserve(held, len(sources))
        if fresh is None:
            return None
        self._imports.grant(key, held, fresh)
        return self._imports.announce(key, Announcement(0, missing.first, sources, is_last=True))

    async def _read(self, key: ImportKey, peer: Peer, copies: list[BlockCopy]) -> None:
        whole = BlockPart(0, self._host.engine.kv_cache.block_bytes)
        await self._blocks.read(key, peer, copies, whole)

    async def _first_damaged(
        self, plan: DigestPlan, reply: kv_transfer_pb2.FetchReply, copies: list[BlockCopy]
    ) -> int | None:
        """Index, of those fetched, of the first block that is not what its owner has."""
        indices = plan.indices(0, len(copies))
        actual = await self._host.digests.of([copies[index].destination for index in indices])
        told = reply.digests[: len(indices)]
        wrong = (i for i, own, other in zip(indices, actual, told, strict=True) if own != other)
        return next(wrong, None)

    def _keep(self, entry: Import, hashes: list[bytes]) -> None:
        """The copies are right: from now on they are cached blocks like any other."""
        table = entry.block_table
        for index in range(len(entry.held), len(table)):
            parent = hashes[index - 1] if index > 0 else None
            self._pool.cache(table[index], hashes[index], parent)
        self._pool.release(reversed(table))

    async def _give_up(self, peer: Peer, release: kv_transfer_pb2.ReleaseRequest) -> None:
        """Tells the owner that nothing will be read any more, whatever was."""
        try:
            await peer.tell(peer.exports.Release, release)
        except BatonError as failure:
            # The lease frees the blocks in its own time.
            event(logger, logging.DEBUG, "release_failed", error=failure)
