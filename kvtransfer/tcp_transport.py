"""The transport for machines without a NIXL wheel: plain sockets, host memory only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError, TransferError
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion, Pull, Transport
from kvtransfer.pulls import ThreadPull, check_peer, pull_fault
from kvtransfer.send_receive import region_view
from kvtransfer.tcp_peer import TcpPeer
from kvtransfer.tcp_server import TcpServer


class TcpTransport(Transport):
    """`agent` names this pod and its epoch; `host` is bound and told to peers."""

    name = "tcp"

    def __init__(self, agent: str, region: MemoryRegion, host: str) -> None:
        self._agent = agent
        self._region = region
        self._host = host
        self._port = 0
        self._memory = region_view(region)
        self._server = TcpServer(agent, region)
        self._peers: dict[str, TcpPeer] = {}
        self._pulls: set[ThreadPull] = set()

    async def start(self) -> None:
        if self._region.memory != "DRAM":
            raise StartupError("transport tcp: only host memory can be read; use nixl")
        try:
            self._port = await asyncio.to_thread(self._server.start, self._host)
        except OSError as error:
            raise StartupError(f"transport tcp: cannot listen on {self._host}: {error}") from error

    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        return kv_transfer_pb2.TransportDescriptor(
            transport=self.name,
            agent=self._agent,
            host=self._host,
            port=self._port,
            base_address=self._region.address,
            block_bytes=self._region.block_bytes,
            num_blocks=self._region.num_blocks,
            memory=self._region.memory,
        )

    async def connect(self, peer: kv_transfer_pb2.TransportDescriptor) -> None:
        check_peer(self.name, self._region, peer)
        connection = self._peers.setdefault(peer.agent, TcpPeer(peer, self._memory))
        try:
            await connection.connect()
        except TransferError:
            if self._peers.get(peer.agent) is connection:
                await self.disconnect(peer.agent)
            raise

    def is_connected(self, agent: str) -> bool:
        peer = self._peers.get(agent)
        return peer is not None and peer.is_usable

    def pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart | None = None) -> Pull:
        part = part or self._region.whole_block
        pull = ThreadPull(agent, tuple(copies), part, self._request_abort, self._pulls.discard)
        self._pulls.add(pull)
        peer = self._peers.get(agent)
        if peer is None or not peer.is_usable:
            pull.settle(f"{agent} is not connected")
            return pull
        fault = pull_fault(pull, peer.num_blocks, self._region)
        if fault is not None or not copies:
            pull.settle(fault)
        else:
            peer.pull(pull)
        return pull

    def set_num_exports(self, num_exports: int) -> None:
        """Nothing to do: the server's threads wait in system calls."""

    async def disconnect(self, agent: str) -> None:
        peer = self._peers.pop(agent, None)
        if peer is not None:
            await peer.close()

    async def close(self) -> None:
        for agent in tuple(self._peers):
            await self.disconnect(agent)
        await asyncio.gather(*(pull.settled() for pull in tuple(self._pulls)))
        if self._port:
            self._port = 0
            await asyncio.to_thread(self._server.close)

    def _request_abort(self, pull: ThreadPull) -> None:
        peer = self._peers.get(pull.agent)
        if peer is not None:
            peer.abort(pull)
