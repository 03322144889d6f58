"""A transport whose reads can be held, refused, cut in two and damaged."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence

from baton.v1 import kv_transfer_pb2
from core.errors import TransferError
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion, Pull, Transport
from tests.faults.points import FaultPoints


class FaultyTransport(Transport):
    """`inner` with the points pull:before, pull:during and pull:after.

    A read held at pull:during has the first half of its blocks in place. When it is given up
    there, the other half still lands once the test lets it go on, and only then has it settled.
    """

    def __init__(self, inner: Transport, region: MemoryRegion, faults: FaultPoints) -> None:
        self.name = inner.name
        self._inner = inner
        self._region = region
        self._faults = faults

    async def start(self) -> None:
        await self._inner.start()

    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        return self._inner.descriptor()

    async def connect(self, peer: kv_transfer_pb2.TransportDescriptor) -> None:
        await self._inner.connect(peer)

    def is_connected(self, agent: str) -> bool:
        return self._inner.is_connected(agent)

    def pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart | None = None) -> Pull:
        def read(some: Sequence[BlockCopy]) -> Pull:
            return self._inner.pull(agent, some, part)

        return FaultyPull(read, copies, self._region, self._faults)

    def set_num_exports(self, num_exports: int) -> None:
        self._inner.set_num_exports(num_exports)

    async def disconnect(self, agent: str) -> None:
        await self._inner.disconnect(agent)

    async def close(self) -> None:
        await self._inner.close()


class FaultyPull(Pull):
    """Two reads of the inner transport, with the points around and between them."""

    def __init__(
        self,
        read: Callable[[Sequence[BlockCopy]], Pull],
        copies: Sequence[BlockCopy],
        region: MemoryRegion,
        faults: FaultPoints,
    ) -> None:
        self._begin = read
        self._region = region
        self._faults = faults
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._part: Pull | None = None
        self._work = asyncio.ensure_future(self._run(list(copies)))
        # What went wrong is told by `done`, which nobody may be waiting for.
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())

    async def done(self) -> None:
        await asyncio.wait({self._work, self._given_up}, return_when=asyncio.FIRST_COMPLETED)
        if self._given_up.done():
            raise TransferError("the read was aborted")
        await self._work

    def abort(self) -> None:
        if self._work.done() or self._given_up.done():
            return
        self._given_up.set_result(None)
        if not self._has_begun:
            self._work.cancel()
        elif self._part is not None:
            self._part.abort()

    async def settled(self) -> None:
        await asyncio.wait({self._work})
        if self._part is not None:
            await self._part.settled()

    async def _run(self, copies: list[BlockCopy]) -> None:
        if await self._faults.at("pull:before") == "fail":
            raise TransferError("a fault: the read was refused")
        self._has_begun = True
        middle = (len(copies) + 1) // 2
        await self._read(copies[:middle])
        action = await self._faults.at("pull:during")
        await self._read(copies[middle:])
        if action == "fail":
            raise TransferError("a fault: the read broke off")
        if await self._faults.at("pull:after") == "corrupt":
            flip_byte(self._region, copies[0].destination)

    async def _read(self, copies: list[BlockCopy]) -> None:
        if copies:
            self._part = self._begin(copies)
            if self._given_up.done():
                # Bytes that are on their way cannot be called back.
                await self._part.settled()
            else:
                await self._part.done()


def flip_byte(region: MemoryRegion, block_id: int) -> None:
    """Damages one byte in the middle of a block."""
    address = region.address + block_id * region.block_bytes + region.block_bytes // 2
    (ctypes.c_ubyte * 1).from_address(address)[0] ^= 0x40
