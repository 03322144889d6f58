"""What others read of this worker's blocks: hand-offs, and what they lack of its prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from core.logs import event
from kvtransfer.digests import DigestPlan
from kvtransfer.exports import Export, ExportKey, ExportTable
from kvtransfer.service import ExportService
from worker.host import WorkerHost

logger = logging.getLogger(__name__)

MAX_LENT_SHARE = 0.25
"""Of the pool: what others fetch must not take the room of this worker's own requests."""


class Exporter:
    """An ExportPolicy of either role. `on_released` hears when a reader is done."""

    def __init__(self, host: WorkerHost, on_released: Callable[[ExportKey, bool], None]) -> None:
        self._host = host
        self._pool = host.engine.pool
        self._max_lent = int(MAX_LENT_SHARE * self._pool.num_blocks)
        self.exports = ExportTable(
            host.settings.lease_config(), host.clock, self._pool.acquire, self._pool.release
        )
        self.on_released = on_released

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers KvExport."""
        host = self._host
        service = ExportService(host.identity, host.transport, self.exports, self)
        kv_transfer_pb2_grpc.add_KvExportServicer_to_server(service, server)

    async def lend(self, request: kv_transfer_pb2.FetchRequest) -> kv_transfer_pb2.FetchReply:
        """Pins the leading blocks that are cached, as far as the share for this allows.

        A repeated request gets the same blocks, and none when it has been released.
        """
        self._host.require_ready()
        key = (request.request_id, request.attempt)
        if not self.exports.is_known(key):
            held = self._pool.match_prefix(request.block_hashes)
            room = max(0, self._max_lent - self.exports.num_lent_blocks)
            if held[:room]:
                self.exports.lend(key, held[:room])
                self.note_opened()
        block_ids = self.exports.trusted_blocks(key)
        plan = DigestPlan(request.digest_every, request.digest_offset)
        verified = [block_ids[index] for index in plan.indices(0, len(block_ids))]
        try:
            digests = await self._host.digests.of(verified)
        except BaseException:
            # The question was taken back: nobody will release what the answer would name.
            self.exports.revoke(key)
            self.on_released(key, False)
            raise
        return kv_transfer_pb2.FetchReply(block_ids=block_ids, digests=digests)

    def hot_blocks(self, max_blocks: int) -> kv_transfer_pb2.HotBlocksReply:
        """Hashes only: whoever wants the blocks fetches them."""
        self._host.require_ready()
        hashes, parents = self._pool.hottest(max(0, max_blocks))
        return kv_transfer_pb2.HotBlocksReply(block_hashes=hashes, parents=parents)

    def on_damaged(self, block_ids: list[int]) -> None:
        """Others read other bytes than were computed here: nobody may use either again."""
        if not block_ids:
            return
        event(logger, logging.ERROR, "blocks_damaged", num_blocks=len(block_ids))
        self._pool.drop_blocks(block_ids)

    def reap(self) -> list[Export]:
        """Ends the exports whose time is over, and returns them."""
        expired = self.exports.reap()
        for export in expired:
            event(logger, logging.WARNING, "export_expired", request_id=export.key[0])
        self._host.counters.num_expired_exports += len(expired)
        return expired

    def note_opened(self) -> None:
        """One more is open: tells the transport at once, since readers may need its help."""
        self._host.counters.num_exports += 1
        self._host.transport.set_num_exports(self.exports.num_open)
