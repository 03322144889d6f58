"""The gRPC services of transfers, one per side.

Translates messages into calls on the export table and its owner, or on the decode service, which
decides about room. Everything runs on the worker's event loop.
"""

from __future__ import annotations

from typing import Any, Protocol

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2
from core.errors import Unavailable
from kvtransfer.base import Transport
from kvtransfer.exports import ExportKey, ExportTable
from kvtransfer.imports import ImportKey
from kvtransfer.peers import Identity, check_fingerprint


class ExportPolicy(Protocol):
    """What the owner of the blocks decides."""

    async def lend(self, request: kv_transfer_pb2.FetchRequest) -> kv_transfer_pb2.FetchReply:
        """Pins what is cached of the blocks that another worker lacks."""

    def hot_blocks(self, max_blocks: int) -> kv_transfer_pb2.HotBlocksReply:
        """What another worker had best have, too."""

    def on_released(self, key: ExportKey, lease_held: bool) -> None:
        """The reader is done with an export, or has given it up."""

    def on_damaged(self, block_ids: list[int]) -> None:
        """The reader got other bytes of these than their digests say.

        No blocks: the export was over, so that others may have written to them.
        """


class ExportService(kv_transfer_pb2_grpc.KvExportServicer):
    """The owner's side: readers connect, fetch what is cached, renew and release."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        exports: ExportTable,
        policy: ExportPolicy,
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._exports = exports
        self._policy = policy

    async def Handshake(
        self, request: kv_transfer_pb2.HandshakeRequest, context: Any
    ) -> kv_transfer_pb2.HandshakeReply:
        """Refuses a peer whose fingerprint differs, with both values named."""
        check_fingerprint(self._identity, request.worker_id, request.fingerprint)
        return kv_transfer_pb2.HandshakeReply(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            fingerprint=self._identity.fingerprint,
            transport=self._transport.descriptor(),
        )

    async def Release(
        self, request: kv_transfer_pb2.ReleaseRequest, context: Any
    ) -> kv_transfer_pb2.ReleaseReply:
        key = (request.request_id, request.attempt)
        if request.HasField("first_damaged_block"):
            blocks = self._exports.trusted_blocks(key)
            self._policy.on_damaged(blocks[request.first_damaged_block :])
        held = self._exports.release(key)
        self._policy.on_released(key, held)
        return kv_transfer_pb2.ReleaseReply(lease_held=held)

    async def Renew(
        self, request: kv_transfer_pb2.RenewRequest, context: Any
    ) -> kv_transfer_pb2.RenewReply:
        held = self._exports.renew((request.request_id, request.attempt))
        return kv_transfer_pb2.RenewReply(lease_held=held)

    async def Fetch(
        self, request: kv_transfer_pb2.FetchRequest, context: Any
    ) -> kv_transfer_pb2.FetchReply:
        self._require_life(request.source_epoch)
        return await self._policy.lend(request)

    async def ListHotBlocks(
        self, request: kv_transfer_pb2.HotBlocksRequest, context: Any
    ) -> kv_transfer_pb2.HotBlocksReply:
        self._require_life(request.source_epoch)
        return self._policy.hot_blocks(request.max_blocks)

    def _require_life(self, epoch: int) -> None:
        if epoch != self._identity.epoch:
            raise Unavailable(f"{self._identity.worker_id} has restarted since this was dispatched")


class ImportPolicy(Protocol):
    """What the decode service decides."""

    async def grant(
        self, key: ImportKey, prefill_epoch: int, decode_epoch: int
    ) -> kv_transfer_pb2.GrantReply:
        """Waits for room.

        Refuses when either worker is not in the life that the dispatch named.
        """

    def announce(self, request: kv_transfer_pb2.AnnounceRequest) -> None:
        """Starts reading what was announced."""

    def revoke(
        self, key: ImportKey, prefill_epoch: int, error: types_pb2.ErrorDetail | None
    ) -> None:
        """Prefill, in this life, gives the hand-off up."""


class ImportService(kv_transfer_pb2_grpc.KvImportServicer):
    """Decode's side: prefill asks for room and announces blocks."""

    def __init__(self, policy: ImportPolicy) -> None:
        self._policy = policy

    async def Grant(
        self, request: kv_transfer_pb2.GrantRequest, context: Any
    ) -> kv_transfer_pb2.GrantReply:
        key = (request.request_id, request.attempt)
        return await self._policy.grant(key, request.prefill_epoch, request.decode_epoch)

    async def Announce(
        self, request: kv_transfer_pb2.AnnounceRequest, context: Any
    ) -> kv_transfer_pb2.AnnounceReply:
        self._policy.announce(request)
        return kv_transfer_pb2.AnnounceReply()

    async def Revoke(
        self, request: kv_transfer_pb2.RevokeRequest, context: Any
    ) -> kv_transfer_pb2.RevokeReply:
        error = request.error if request.HasField("error") else None
        key = (request.request_id, request.attempt)
        self._policy.revoke(key, request.prefill_epoch, error)
        return kv_transfer_pb2.RevokeReply()
