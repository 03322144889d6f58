"""Measures a transport between two processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import time
from collections.abc import AsyncIterator, Sequence

from core.errors import TransferError
from kvtransfer.base import BlockCopy, Transport
from kvtransfer.local_peer import LOOPBACK, HostPool, LocalPeer, block_content, local_peer
from kvtransfer.select import make_transport

PULL_TIMEOUT_S = 60.0
WIRE_UP_S = 0.3
"""How long a new connection is left alone before its first read."""


class LocalPair:
    """A reader in this process, connected to a peer in another one.

    Its pulls read blocks in a shuffled order, so that no two make one piece.
    """

    def __init__(self, transport: Transport, agent: str, pool: HostPool) -> None:
        self.pool = pool
        self._transport = transport
        self._agent = agent
        self._source = HostPool(pool.region.num_blocks, pool.region.block_bytes)
        self._source.fill(1)
        shuffled = random.Random(0)
        sources = list(range(pool.region.num_blocks))
        destinations = list(sources)
        shuffled.shuffle(sources)
        shuffled.shuffle(destinations)
        self._copies = [BlockCopy(*pair) for pair in zip(sources, destinations, strict=True)]

    async def pull(self, num_blocks: int | None = None) -> float:
        """Reads so many blocks, or all, once; seconds that it took. Raises TransferError."""
        copies = self._copies[:num_blocks]
        begin = time.perf_counter()
        pull = self._transport.pull(self._agent, copies)
        await asyncio.wait_for(pull.done(), PULL_TIMEOUT_S)
        return time.perf_counter() - begin

    def memcpy(self, num_blocks: int | None = None) -> float:
        """Seconds that one core takes to copy so many blocks to the same places as `pull`, but
        out of memory of this process."""
        return copy_blocks_s(self._source, self.pool, self._copies[:num_blocks])

    async def test(self) -> None:
        """Reads every block and compares it with what the peer wrote. Raises TransferError."""
        await self.pull()
        num_bytes = self.pool.region.block_bytes
        for copy in self._copies:
            if self.pool.block(copy.destination) != block_content(0, copy.source, num_bytes):
                raise TransferError(f"block {copy.source} arrived with other content")


@contextlib.asynccontextmanager
async def local_pair(transport: str, num_blocks: int, block_bytes: int) -> AsyncIterator[LocalPair]:
    """A pair whose connection is up. Raises StartupError or TransferError."""
    with local_peer(transport, "owner@1", (num_blocks, block_bytes)) as peer:
        async with paired(peer) as pair:
            yield pair


@contextlib.asynccontextmanager
async def paired(peer: LocalPeer) -> AsyncIterator[LocalPair]:
    """A reader of a peer that runs already. Raises StartupError or TransferError."""
    shape = peer.descriptor
    pool = HostPool(shape.num_blocks, shape.block_bytes)
    reader = make_transport(shape.transport, "reader@1", pool.region, LOOPBACK)
    await reader.start()
    try:
        await reader.connect(peer.descriptor)
        await asyncio.sleep(WIRE_UP_S)
        yield LocalPair(reader, shape.agent, pool)
    finally:
        await reader.close()


def copy_blocks_s(source: HostPool, destination: HostPool, copies: Sequence[BlockCopy]) -> float:
    """Seconds that one core takes to copy blocks of `source` to `destination`."""
    num_bytes = source.region.block_bytes
    begin = time.perf_counter()
    for copy in copies:
        ctypes.memmove(
            destination.region.address + copy.destination * num_bytes,
            source.region.address + copy.source * num_bytes,
            num_bytes,
        )
    return time.perf_counter() - begin
