"""What both ends of the tcp transport share: frames on a socket, and blocks as runs of bytes.

Every fault of the connection or the protocol is an OSError here.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from kvtransfer.base import BlockPart
from kvtransfer.send_receive import LENGTH_BYTES, M, frame, parse, payload_length

SEGMENT_BYTES = 1 << 20
"""Most bytes for one system call: larger ones fall out of the cache and take twice as long."""
ACCEPTED = b"\x00"
"""The owner's answer to a hello that names it."""
DEAD_PEER_S = 30
"""After this long without an answer from the peer's kernel the connection fails."""


def tune(connection: socket.socket) -> None:
    """No delay for requests; notices a dead machine. Buffer sizes stay with the kernel's
    autotuning, which a fixed size would turn off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_PEER_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_PEER_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def runs(block_ids: Sequence[int], block_bytes: int, part: BlockPart) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of this part of each block, in order: neighbours are joined, and what is
    longer than SEGMENT_BYTES is cut."""
    start = end = 0
    for block_id in block_ids:
        offset = block_id * block_bytes + part.offset
        if offset != end:
            yield from _segments(start, end)
            start = offset
        end = offset + part.num_bytes
    yield from _segments(start, end)


def _segments(start: int, end: int) -> Iterator[tuple[int, int]]:
    for offset in range(start, end, SEGMENT_BYTES):
        yield offset, min(SEGMENT_BYTES, end - offset)


def send_frame(connection: socket.socket, message: Message) -> None:
    connection.sendall(frame(message))


def receive_frame(connection: socket.socket, kind: type[M]) -> M | None:
    """The next message; None when the peer closed between two frames."""
    header = bytearray(LENGTH_BYTES)
    num_bytes = connection.recv_into(header)
    if num_bytes == 0:
        return None
    receive_into(connection, memoryview(header)[num_bytes:])
    payload = bytearray(payload_length(header))
    receive_into(connection, memoryview(payload))
    return parse(kind, payload)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills `view`. Raises ConnectionError when the peer closes before."""
    while view:
        num_bytes = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if num_bytes == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[num_bytes:]
