"""A plain Python socket between two processes: what the transports over TCP compare with."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from kvtransfer.base import BlockCopy
from kvtransfer.local_peer import LOOPBACK, HostPool
from kvtransfer.measure import copy_blocks_s

SEGMENT_BYTES = 1 << 20
COUNT_BYTES = 4


class SocketPair:
    """Receives a pool of another process block by block, at most a mebibyte at a time."""

    def __init__(self, connection: socket.socket, shape: tuple[int, int]) -> None:
        self._connection = connection
        self._pool, self._source = HostPool(*shape), HostPool(*shape)
        self._source.fill(1)

    async def pull(self, num_blocks: int) -> float:
        """Receives the first `num_blocks` blocks; seconds that it took."""
        num_bytes = num_blocks * self._pool.region.block_bytes
        begin = time.perf_counter()
        self._connection.sendall(num_bytes.to_bytes(COUNT_BYTES, "big"))
        with memoryview(self._pool.memory) as view:
            for segment in _segments(view[:num_bytes], self._pool.region.block_bytes):
                self._connection.recv_into(segment, len(segment), socket.MSG_WAITALL)
                segment.release()
        return time.perf_counter() - begin

    def memcpy(self, num_blocks: int) -> float:
        """Seconds that one core takes to copy so many blocks to the same places."""
        copies = [BlockCopy(block_id, block_id) for block_id in range(num_blocks)]
        return copy_blocks_s(self._source, self._pool, copies)


@contextlib.contextmanager
def socket_pair(shape: tuple[int, int], buffer_bytes: int | None) -> Iterator[SocketPair]:
    """A pair that is connected. `buffer_bytes` fixes both socket buffers, which turns the
    kernel's autotuning off."""
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_send, args=(child_end, shape, buffer_bytes), daemon=True)
    process.start()
    try:
        with socket.socket() as connection:
            _fix_buffers(connection, buffer_bytes)
            connection.connect((LOOPBACK, pipe.recv()))
            yield SocketPair(connection, shape)
    finally:
        process.kill()
        process.join()


def _send(pipe: Connection, shape: tuple[int, int], buffer_bytes: int | None) -> None:
    pool = HostPool(*shape)
    pool.fill(1)
    with socket.socket() as listener:
        _fix_buffers(listener, buffer_bytes)  # Accepted connections inherit them.
        listener.bind((LOOPBACK, 0))
        listener.listen()
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection, memoryview(pool.memory) as view:
            while count := connection.recv(COUNT_BYTES, socket.MSG_WAITALL):
                asked = view[: int.from_bytes(count, "big")]
                for segment in _segments(asked, pool.region.block_bytes):
                    connection.sendall(segment)


def _segments(view: memoryview, block_bytes: int) -> Iterator[memoryview]:
    step = min(block_bytes, SEGMENT_BYTES)
    for offset in range(0, len(view), step):
        yield view[offset : offset + step]


def _fix_buffers(connection: socket.socket, buffer_bytes: int | None) -> None:
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
