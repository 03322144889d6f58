"""Messages of a call within its DATA frames: a flag, a length, and so many bytes."""

from __future__ import annotations

import struct
import zlib

import grpc

PREFIX = struct.Struct(">BI")
"""Whether it is compressed, and its length."""

ENCODINGS = {"identity": None, "deflate": zlib.MAX_WBITS, "gzip": 16 + zlib.MAX_WBITS}
"""zlib's window bits, by the name in `grpc-encoding`."""


class Refused(Exception):
    """A call that ends with `code` because of what its client sent, or did not send."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Puts together messages of at most `max_bytes`, decompressed."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._window_bits = ENCODINGS[encoding]
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def is_between_messages(self) -> bool:
        return not self._buffer

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises Refused."""
        buffer = self._buffer
        buffer += data
        messages = []
        while len(buffer) >= PREFIX.size:
            is_compressed, length = PREFIX.unpack_from(buffer)
            self._check_length(length)
            end = PREFIX.size + length
            if len(buffer) < end:
                break
            message = bytes(buffer[PREFIX.size : end])
            del buffer[:end]
            messages.append(self._decompress(message) if is_compressed else message)
        return messages

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
        if not inflater.eof:
            raise Refused(grpc.StatusCode.INTERNAL, "a compressed message has no end")
        return whole
