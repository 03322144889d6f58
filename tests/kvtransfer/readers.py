"""What the transport tests build on: a reading end, and the backends to run it with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

import pytest

from kvtransfer.base import BlockPart, Transport
from kvtransfer.local_peer import LOOPBACK, HostPool, LocalPeer, block_content
from kvtransfer.nixl_library import installed_nixl
from kvtransfer.select import make_transport
from kvtransfer.ucxx_library import is_ucxx_installed

NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 16
SHAPE = (NUM_BLOCKS, BLOCK_BYTES)
PROMPT_S = 30.0
"""Who waits longer hangs: a busy machine is late, too."""
A_WHILE_S = 0.3
UCX_TLS = {
    "nixl-cma": "cma,tcp,self",
    "nixl-tcp": "tcp,self",
    "ucxx": "cma,tcp,self",
    "tcp": "",
}

needs_nixl = pytest.mark.skipif(installed_nixl() is None, reason="no NIXL wheel is installed")
needs_ucxx = pytest.mark.skipif(not is_ucxx_installed(), reason="no ucxx wheel is installed")
BACKENDS = [
    pytest.param("nixl-cma", marks=needs_nixl),
    pytest.param("nixl-tcp", marks=needs_nixl),
    pytest.param("ucxx", marks=needs_ucxx),
    "tcp",
]


class Reader:
    """An own pool of zeros behind a started transport."""

    def __init__(self, backend: str, num_blocks: int = NUM_BLOCKS) -> None:
        self.pool = HostPool(num_blocks, BLOCK_BYTES)
        self.transport = make_transport(transport_of(backend), "r@1", self.pool.region, LOOPBACK)

    def holds(self, destination: int, seed: int, source: int) -> bool:
        return self.pool.block(destination) == block_content(seed, source, BLOCK_BYTES)

    def holds_only(self, destination: int, part: BlockPart, seed: int, source: int) -> bool:
        """Whether that part of the peer's block is in place, and zeros before and behind it."""
        expected = bytearray(BLOCK_BYTES)
        end = part.offset + part.num_bytes
        expected[part.offset : end] = block_content(seed, source, part.num_bytes)
        return self.pool.block(destination) == expected

    def is_untouched(self, block_id: int) -> bool:
        return self.pool.block(block_id) == bytes(BLOCK_BYTES)


def transport_of(backend: str) -> str:
    return backend.partition("-")[0]


@contextlib.asynccontextmanager
async def started(reader: Reader, *peers: LocalPeer) -> AsyncIterator[Transport]:
    await reader.transport.start()
    try:
        for peer in peers:
            await reader.transport.connect(peer.descriptor)
        yield reader.transport
    finally:
        await asyncio.wait_for(reader.transport.close(), PROMPT_S)


async def promptly(waiting: Awaitable[object]) -> None:
    await asyncio.wait_for(waiting, PROMPT_S)


async def goes_on(waiting: Awaitable[object]) -> bool:
    """Whether `waiting` is not over after a while."""
    try:
        await asyncio.wait_for(waiting, A_WHILE_S)
    except TimeoutError:
        return True
    return False
