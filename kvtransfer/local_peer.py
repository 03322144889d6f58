"""A peer in a process of its own on this machine, to measure and to test transports against."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError
from kvtransfer.base import MemoryRegion
from kvtransfer.select import make_transport

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 30.0


class HostPool:
    """A pool of blocks in host memory; block i of a filled one repeats the byte `seed + i`."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, num_blocks * block_bytes, flags=flags)
        # A read through CMA looks up every page: with huge ones it is twice as fast.
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._anchor = ctypes.c_ubyte.from_buffer(self.memory)
        self.region = MemoryRegion(ctypes.addressof(self._anchor), num_blocks, block_bytes)

    def fill(self, seed: int) -> None:
        num_bytes = self.region.block_bytes
        for block_id in range(self.region.num_blocks):
            content = block_content(seed, block_id, num_bytes)
            self.memory[block_id * num_bytes : (block_id + 1) * num_bytes] = content

    def block(self, block_id: int) -> bytes:
        num_bytes = self.region.block_bytes
        return self.memory[block_id * num_bytes : (block_id + 1) * num_bytes]


def block_content(seed: int, block_id: int, block_bytes: int) -> bytes:
    """What `HostPool.fill(seed)` writes into one block; never zeros."""
    return bytes([(seed + block_id) % 255 + 1]) * block_bytes


class LocalPeer:
    """The other process: a filled pool behind a started transport, with exports open."""

    def __init__(self, transport: str, agent: str, shape: tuple[int, int], seed: int) -> None:
        """Starts it. `shape`: number of blocks, bytes of one. Raises StartupError."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_end, transport, agent, shape, seed), daemon=True
        )
        self._process.start()
        child_end.close()
        try:
            if not self._pipe.poll(START_TIMEOUT_S):
                raise EOFError
            message = self._pipe.recv_bytes()
        except EOFError as error:
            self.kill()
            raise StartupError(f"transport {transport}: the local peer did not start") from error
        self.descriptor = kv_transfer_pb2.TransportDescriptor.FromString(message)

    def stall(self) -> None:
        """Stops it in its tracks (SIGSTOP), as a hung machine would look; returns when it did."""
        os.kill(self._pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends it without a farewell."""
        self._process.kill()
        self.join()

    def join(self) -> None:
        """Waits for its end, which closing the pipe asks for. Idempotent."""
        self._pipe.close()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


@contextlib.contextmanager
def local_peer(
    transport: str, agent: str, shape: tuple[int, int], seed: int = 0
) -> Iterator[LocalPeer]:
    """A LocalPeer that is gone afterwards, stalled or not."""
    peer = LocalPeer(transport, agent, shape, seed)
    try:
        yield peer
    finally:
        peer.kill()


def _serve(pipe: Connection, transport: str, agent: str, shape: tuple[int, int], seed: int) -> None:
    asyncio.run(_serve_until_closed(pipe, transport, agent, shape, seed))


async def _serve_until_closed(
    pipe: Connection, transport: str, agent: str, shape: tuple[int, int], seed: int
) -> None:
    pool = HostPool(*shape)
    pool.fill(seed)
    served = make_transport(transport, agent, pool.region, LOOPBACK)
    await served.start()
    served.set_num_exports(1)
    pipe.send_bytes(served.descriptor().SerializeToString())
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(pipe.recv_bytes)
    await served.close()
