"""The other workers that this one has dealt with: a channel each, and for reading a handshake.

A peer is one life of a worker: (worker id, epoch). Connecting is done once per life, before
the first transfer, and refused when the two pods' fingerprints differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2, worker_pb2
from core import fingerprint
from core.errors import FailedPrecondition, Unavailable, Unreachable
from core.rpc import open_channel, pod_errors
from core.tls import Tls
from kvtransfer.base import Transport
from kvtransfer.link import LinkMeter

CONTROL_TIMEOUT_S = 10.0
"""For short messages to a peer."""
_SAY_AGAIN_AFTER_S = (0.05, 0.2)

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Identity:
    """Who this worker is, for handshakes."""

    worker_id: str
    epoch: int
    fingerprint: types_pb2.Fingerprint


class Peer:
    """One life of another worker."""

    def __init__(self, address: worker_pb2.WorkerAddress, tls: Tls | None) -> None:
        self.worker_id = address.worker_id
        self.epoch = address.epoch
        self.channel = open_channel(address.address, tls)
        self.exports = kv_transfer_pb2_grpc.KvExportStub(self.channel)
        self.imports = kv_transfer_pb2_grpc.KvImportStub(self.channel)
        self.agent = ""
        """Name in the transport, once connected."""
        self.lock = asyncio.Lock()
        self.link = LinkMeter()

    async def tell(self, method: Callable[..., Awaitable[Reply]], message: Any) -> Reply:
        """Calls an idempotent method, again if the message or its answer may have been lost.

        Raises the peer's own error, or Unreachable.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONTROL_TIMEOUT_S
        pauses = iter(_SAY_AGAIN_AFTER_S)
        while True:
            try:
                with pod_errors(self.worker_id):
                    return await method(message, timeout=deadline - loop.time())
            except Unreachable:
                pause_s = next(pauses, None)
                if pause_s is None or loop.time() + pause_s >= deadline:
                    raise
            await asyncio.sleep(pause_s)


class PeerDirectory:
    """Channels to peers, opened on demand and closed when a newer life takes the name."""

    def __init__(self, identity: Identity, transport: Transport, tls: Tls | None = None) -> None:
        self._identity = identity
        self._tls = tls
        self._transport = transport
        self._peers: dict[str, Peer] = {}

    async def get(self, address: worker_pb2.WorkerAddress) -> Peer:
        """The peer at `address`; a former life under the same id is forgotten.

        Raises Unavailable for an epoch that is older than one already seen.
        """
        peer = self._peers.get(address.worker_id)
        if peer is not None and peer.epoch > address.epoch:
            raise Unavailable(f"{address.worker_id} has restarted since this was dispatched")
        if peer is not None and peer.epoch == address.epoch:
            return peer
        fresh = Peer(address, self._tls)
        self._peers[address.worker_id] = fresh
        if peer is not None:
            await self._forget(peer)
        return fresh

    async def connected(self, address: worker_pb2.WorkerAddress) -> Peer:
        """The peer, with its memory readable.

        Raises FailedPrecondition when fingerprints differ, Unavailable when it is away.
        """
        peer = await self.get(address)
        async with peer.lock:
            if peer.agent and self._transport.is_connected(peer.agent):
                return peer
            reply = await self._handshake(peer)
            check_fingerprint(self._identity, reply.worker_id, reply.fingerprint)
            await self._transport.connect(reply.transport)
            peer.agent = reply.transport.agent
        return peer

    async def _handshake(self, peer: Peer) -> kv_transfer_pb2.HandshakeReply:
        request = kv_transfer_pb2.HandshakeRequest(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            fingerprint=self._identity.fingerprint,
            transport=self._transport.descriptor(),
        )
        with pod_errors(peer.worker_id):
            reply = await peer.exports.Handshake(request, timeout=CONTROL_TIMEOUT_S)
        if reply.epoch != peer.epoch:
            raise Unavailable(f"{peer.worker_id} has restarted since this was dispatched")
        return reply

    def link_speeds(self) -> dict[str, float]:
        """Bytes per second by worker id, of the peers from which enough was read to tell."""
        speeds = {name: peer.link.estimate().bytes_per_s for name, peer in self._peers.items()}
        return {name: speed for name, speed in speeds.items() if speed > 0}

    async def close(self) -> None:
        """Forgets every peer."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await self._forget(peer)

    async def _forget(self, peer: Peer) -> None:
        if peer.agent:
            await self._transport.disconnect(peer.agent)
        await peer.channel.close(None)


def check_fingerprint(own: Identity, peer_id: str, peer_fingerprint: types_pb2.Fingerprint) -> None:
    """Raises FailedPrecondition naming both values of every field that differs."""
    differences = fingerprint.mismatches(own.fingerprint, peer_fingerprint)
    if differences:
        raise FailedPrecondition(
            f"{own.worker_id} and {peer_id} do not fit together: " + "; ".join(differences)
        )
