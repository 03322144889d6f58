"""The transport for UCX without NIXL: the owner sends, over UCX's tagged messages.

This is the event loop's side; `UcxxAgent` does the work on a thread of its own. What UCX sends
over (TCP, or what an installed UCX finds besides) is its choice.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError, TransferError
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion, Pull, Transport
from kvtransfer.job_thread import WatchingThread
from kvtransfer.pulls import ThreadPull, check_peer
from kvtransfer.ucxx_agent import UcxxAgent

CONNECT_TIMEOUT_S = 5.0


class UcxxTransport(Transport):
    """`agent` names this pod and its epoch; `host` is told to peers. UCX listens on all of the
    machine's IPv4 addresses, whatever `host` is.

    A read of a stalled peer does not end by itself, but settles as soon as it is aborted.
    """

    name = "ucxx"

    def __init__(self, agent: str, region: MemoryRegion, host: str) -> None:
        self._agent_name = agent
        self._region = region
        self._host = host
        self._agent = UcxxAgent(agent, region, host)
        self._thread = WatchingThread("kv-ucxx", self._agent.tick)
        self._pulls: set[ThreadPull] = set()

    async def start(self) -> None:
        if self._region.memory != "DRAM":
            raise StartupError("transport ucxx: only host memory can be read; use nixl")
        self._thread.start()
        try:
            await self._thread.call(lambda: self._thread.watch(self._agent.open()))
        except BaseException:
            await self._thread.stop()
            raise

    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        return kv_transfer_pb2.TransportDescriptor(
            transport=self.name,
            agent=self._agent_name,
            host=self._host,
            port=self._agent.port,
            base_address=self._region.address,
            block_bytes=self._region.block_bytes,
            num_blocks=self._region.num_blocks,
            memory=self._region.memory,
        )

    async def connect(self, peer: kv_transfer_pb2.TransportDescriptor) -> None:
        check_peer(self.name, self._region, peer)
        if self.is_connected(peer.agent):
            return
        address = await _numeric_address(peer)
        greeting = self._new_pull(peer.agent, (), self._region.whole_block)
        await self._thread.call(partial(self._agent.connect, peer, address, greeting))
        try:
            await asyncio.wait_for(greeting.done(), CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            await self.disconnect(peer.agent)
            raise TransferError(f"cannot connect to {peer.agent}: no answer") from error
        except TransferError as error:
            raise TransferError(f"cannot connect to {error}") from error

    def is_connected(self, agent: str) -> bool:
        return self._agent.is_usable(agent)

    def pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart | None = None) -> Pull:
        pull = self._new_pull(agent, copies, part or self._region.whole_block)
        if self._thread.is_running:
            self._thread.post(partial(self._agent.pull, pull))
        else:
            pull.settle("the transport does not run")
        return pull

    def set_num_exports(self, num_exports: int) -> None:
        """Nothing to do: UCX wakes the thread for whoever asks."""

    async def disconnect(self, agent: str) -> None:
        await self._thread.call(partial(self._agent.disconnect, agent))

    async def close(self) -> None:
        if not self._thread.is_running:
            return
        for pull in tuple(self._pulls):
            pull.abort()
        await asyncio.gather(*(pull.settled() for pull in tuple(self._pulls)))
        await self._thread.call(self._agent.close)
        await self._thread.stop()

    def _new_pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart) -> ThreadPull:
        pull = ThreadPull(agent, tuple(copies), part, self._request_abort, self._pulls.discard)
        self._pulls.add(pull)
        return pull

    def _request_abort(self, pull: ThreadPull) -> None:
        self._thread.post(partial(self._agent.abort, pull))


async def _numeric_address(peer: kv_transfer_pb2.TransportDescriptor) -> str:
    """The peer's IPv4 address; UCX would look it up in the thread that must not wait."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            peer.host, peer.port, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise TransferError(f"cannot connect to {peer.agent}: {peer.host}: {error}") from error
    return str(found[0][4][0])
