"""A read in flight, seen from both of its sides: the event loop and a transport's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.v1 import kv_transfer_pb2
from core.errors import TransferError
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion, Pull


class ThreadPull(Pull):
    """A Pull that a thread carries out. `fail` and `settle` may be called from any thread."""

    def __init__(
        self,
        agent: str,
        copies: Sequence[BlockCopy],
        part: BlockPart,
        request_abort: Callable[[ThreadPull], None],
        on_settled: Callable[[ThreadPull], object],
    ) -> None:
        self.agent = agent
        self.copies = copies
        self.part = part
        self.is_aborted = False
        self._request_abort = request_abort
        self._on_settled = on_settled
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        self._has_ended = asyncio.Event()
        self._has_settled = asyncio.Event()

    async def done(self) -> None:
        await self._has_ended.wait()
        if self._failure is not None:
            raise TransferError(self._failure)

    def abort(self) -> None:
        if self._has_ended.is_set():
            return
        self.is_aborted = True
        self._end("the read was aborted")
        self._request_abort(self)

    async def settled(self) -> None:
        await self._has_settled.wait()

    def fail(self, failure: str) -> None:
        """`done` raises from now on, although bytes may still land."""
        self._loop.call_soon_threadsafe(self._end, failure)

    def settle(self, failure: str | None = None) -> None:
        """No byte can land any more; without `failure` all of them did. Idempotent."""
        self._loop.call_soon_threadsafe(self._settle, failure)

    def _end(self, failure: str | None) -> None:
        if not self._has_ended.is_set():
            self._failure = failure
            self._has_ended.set()

    def _settle(self, failure: str | None) -> None:
        self._end(failure)
        self._has_settled.set()
        self._on_settled(self)


def check_peer(
    transport: str, region: MemoryRegion, peer: kv_transfer_pb2.TransportDescriptor
) -> None:
    """Raises TransferError when blocks of `peer` cannot be read into `region`."""
    if peer.transport != transport:
        raise TransferError(f"{peer.agent} speaks {peer.transport!r}, this pod {transport!r}")
    if peer.block_bytes != region.block_bytes:
        raise TransferError(
            f"{peer.agent} has blocks of {peer.block_bytes} bytes, this pod {region.block_bytes}"
        )
    if peer.num_blocks <= 0:
        raise TransferError(f"{peer.agent} has no blocks")


def pull_fault(pull: ThreadPull, num_peer_blocks: int, own: MemoryRegion) -> str | None:
    """Names what of a read is out of bounds: its part of a block, or the first block id
    outside its pool. None when nothing is."""
    if not pull.part.is_inside(own.block_bytes):
        return f"{pull.part} is not inside a block of {own.block_bytes} bytes"
    for copy in pull.copies:
        if not 0 <= copy.source < num_peer_blocks:
            return f"source block {copy.source} is not one of {num_peer_blocks}"
        if not 0 <= copy.destination < own.num_blocks:
            return f"destination block {copy.destination} is not one of {own.num_blocks}"
    return None
