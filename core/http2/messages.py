"""gRPC's messages within DATA frames: a flag, a length, and so many bytes."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable

import grpc

CONTENT_TYPE = b"application/grpc"
PREFIX = struct.Struct(">BI")
"""Whether it is compressed, and its length."""

ENCODINGS = {"identity": None, "deflate": zlib.MAX_WBITS, "gzip": 16 + zlib.MAX_WBITS}
"""zlib's window bits, by the name in `grpc-encoding`."""


def is_grpc(content_type: bytes) -> bool:
    """Whether messages come.

    "application/grpc+proto" and parameters behind ";" are gRPC's, "application/grpc-web" not.
    """
    kind = content_type[len(CONTENT_TYPE) :]
    return content_type.startswith(CONTENT_TYPE) and kind[:1] in (b"", b"+", b";")


class Refused(Exception):
    """A call that ends with `code` because of what the peer sent, or did not send."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Puts together messages of at most `max_bytes`.

    They wait as they came, however many and however well compressed, until they are taken.
    """

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._window_bits = ENCODINGS[encoding]
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def num_bytes(self) -> int:
        """That have come and have not been taken."""
        return len(self._buffer)

    @property
    def is_empty(self) -> bool:
        """Whether all that came has been taken."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Adds what has come. Raises Refused if the first message is too long."""
        self._buffer += data
        self._end_of_first()

    def has_message(self) -> bool:
        """Whether the first message is whole. Raises Refused if it is too long."""
        return 0 < self._end_of_first() <= len(self._buffer)

    def has_more(self) -> bool:
        """Whether something follows the first message."""
        return 0 < self._end_of_first() < len(self._buffer)

    def take(self) -> bytes:
        """The first message, which is whole, decompressed. Raises Refused."""
        end = self._end_of_first()
        is_compressed = self._buffer[0]
        message = bytes(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return self._decompress(message) if is_compressed else message

    def clear(self) -> None:
        """Forgets what waits."""
        self._buffer.clear()

    def _end_of_first(self) -> int:
        """Where in the buffer it is going to end; 0 if its length has not come."""
        if len(self._buffer) < PREFIX.size:
            return 0
        length: int = PREFIX.unpack_from(self._buffer)[1]
        self._check_length(length)
        return PREFIX.size + length

    def _check_length(self, length: int) -> None:
        if length > self._max_bytes:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"a message has {length} bytes; at most {self._max_bytes} are taken",
            )

    def _decompress(self, message: bytes) -> bytes:
        if self._window_bits is None:
            raise Refused(
                grpc.StatusCode.INTERNAL, "a message is compressed, and no grpc-encoding says how"
            )
        inflater = zlib.decompressobj(self._window_bits)
        try:
            whole = inflater.decompress(message, self._max_bytes + 1)
        except zlib.error as error:
            raise Refused(grpc.StatusCode.INTERNAL, f"a compressed message: {error}") from None
        self._check_length(len(whole))
        if not inflater.eof or inflater.unused_data:
            raise Refused(
                grpc.StatusCode.INTERNAL, "a compressed message does not end where it should"
            )
        return whole


SendPiece = Callable[[bytes, int], int]
"""Sends what the peer has room for of a message from some byte on; returns how many bytes."""


class HeldMessages:
    """Messages for which the peer had no room yet: they leave in order, and in pieces."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_sent_bytes = 0
        """Of the first."""

    def __bool__(self) -> bool:
        return bool(self._messages)

    @property
    def is_mid_message(self) -> bool:
        """Whether a part of a message has been sent, and not all of it."""
        return self._num_sent_bytes > 0

    def add(self, message: bytes) -> None:
        """Behind those that wait. A message is not empty: gRPC's begin with a prefix."""
        self._messages.append(message)

    def send_piece(self, send: SendPiece) -> bool:
        """Sends more of the first message, which there is; returns whether there was room."""
        message = self._messages[0]
        num_bytes = send(message, self._num_sent_bytes)
        self._num_sent_bytes += num_bytes
        if self._num_sent_bytes == len(message):
            self._messages.popleft()
            self._num_sent_bytes = 0
        return num_bytes > 0

    def clear(self) -> None:
        """Forgets what waits. What was begun remains begun."""
        self._messages.clear()
