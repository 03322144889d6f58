"""The contract of a KV transport: how one pod reads blocks of another pod's pool.

A transport sees one registered memory region per pod, cut into equal blocks, and knows
neither tensors nor sequences. The reader pulls; the owner only has its memory registered, so
only the reader issues operations on the reader's memory.

The order of calls: `start` → `descriptor` (sent to peers in a handshake) → `connect(peer)`,
once per peer epoch → any number of `pull` → `disconnect(peer)` → `close`. All coroutines run
on one event loop; a transport does its blocking work in threads of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True)
class BlockPart:
    """A range of bytes inside a block; it is the same one in every block of a read."""

    offset: int
    num_bytes: int

    def is_inside(self, block_bytes: int) -> bool:
        """Whether blocks of this size have such a part, and it is not empty."""
        return self.offset >= 0 and 0 < self.num_bytes <= block_bytes - self.offset


@dataclass(frozen=True)
class MemoryRegion:
    """Memory to register. It outlives the transport; the caller keeps it alive."""

    address: int
    num_blocks: int
    block_bytes: int
    memory: str = "DRAM"
    """"DRAM" or "VRAM"."""
    device_id: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def whole_block(self) -> BlockPart:
        return BlockPart(0, self.block_bytes)


@dataclass(frozen=True)
class BlockCopy:
    """One block to read: the peer's `source` into the own `destination`."""

    source: int
    destination: int


class Pull(ABC):
    """One read in flight. Its destination blocks belong to it until `settled` returns."""

    @abstractmethod
    async def done(self) -> None:
        """Returns when every byte is in place.

        Raises core.errors.TransferError when the read failed, the peer died, or `abort` was
        called; cancelling the wait does not cancel the read.
        """

    @abstractmethod
    def abort(self) -> None:
        """Asks to give the read up. Bytes may still land until `settled` returns."""

    @abstractmethod
    async def settled(self) -> None:
        """Returns when no byte of this read can land any more, however it ended."""


class Transport(ABC):
    """One pod's end of the data plane."""

    name: str

    @abstractmethod
    async def start(self) -> None:
        """Registers the region and starts threads. Raises StartupError."""

    @abstractmethod
    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        """What a peer needs to connect; valid after `start`."""

    @abstractmethod
    async def connect(self, peer: kv_transfer_pb2.TransportDescriptor) -> None:
        """Makes `peer.agent` readable; a no-op when it is. Raises TransferError."""

    @abstractmethod
    def is_connected(self, agent: str) -> bool:
        """Whether `pull` from this agent may be tried."""

    @abstractmethod
    def pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart | None = None) -> Pull:
        """Starts reading blocks of a connected peer, or the same `part` of each of them; never
        blocks. The other bytes of the destination blocks stay as they are.

        An agent that is not connected, and a block or a part outside its bounds, make a Pull
        whose `done` raises TransferError.
        """

    @abstractmethod
    def set_num_exports(self, num_exports: int) -> None:
        """How many exports peers may be reading now: decides how often the owner must help."""

    @abstractmethod
    async def disconnect(self, agent: str) -> None:
        """Forgets a peer; its pulls in flight fail and settle."""

    @abstractmethod
    async def close(self) -> None:
        """Aborts what is in flight, waits until it settled, frees everything."""
