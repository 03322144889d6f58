"""Frames of HTTP/2: how bytes that came are cut into them, and how they are made.

RFC 9113, sections 4 and 6.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 1 << 18
MAX_HEADER_BYTES = 1 << 15
"""Of a request's or an answer's headers, compressed or not."""

HEAD = struct.Struct(">HBBBI")
"""A frame's length (upper 16 bits, lower 8), type, flags and stream (4.1)."""
NUMBER = struct.Struct(">I")
SETTING = struct.Struct(">HI")
MAX_NUMBER = (1 << 31) - 1
"""Streams and windows have 31 bits."""


class Kind(IntEnum):
    """Types of frames (6); others are ignored (4.1)."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


END_STREAM = ACK = 0x1
END_HEADERS = 0x4
_PADDED = 0x8
_PRIORITY = 0x20
_PRIORITY_BYTES = 5


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12


class Http2Error(Exception):
    """What the peer sent ends the connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code


class Frame(NamedTuple):
    """One frame; headers whole, however many frames they came in."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes
    """Without padding and priority."""
    num_bytes: int
    """Of the payload as it came, which is what flow control counts."""


def frame(kind: Kind, flags: int, stream_id: int, payload: bytes) -> bytes:
    """As it goes on the wire."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


class FrameReader:
    """Cuts what a peer sends into frames. They begin behind `preface`, with settings."""

    def __init__(self, preface: bytes) -> None:
        self._buffer = bytearray()
        self._preface = preface
        """What of it has not come."""
        self._has_settings = False
        self._begun: Frame | None = None
        """Headers that go on in the next frame."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises Http2Error."""
        buffer = self._buffer
        buffer += data
        if self._preface and not self._take_preface():
            return
        start = 0
        try:
            while len(buffer) - start >= HEAD.size:
                high, low, kind, flags, stream_id = HEAD.unpack_from(buffer, start)
                if not self._has_settings:
                    self._check_first(kind)
                length = high << 8 | low
                if length > MAX_FRAME_BYTES:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                end = start + HEAD.size + length
                if len(buffer) < end:
                    return
                payload = bytes(buffer[start + HEAD.size : end])
                start = end
                whole = self._whole(Frame(kind, flags, stream_id & MAX_NUMBER, payload, length))
                if whole is not None:
                    yield whole
        finally:
            del buffer[:start]

    def _take_preface(self) -> bool:
        buffer, preface = self._buffer, self._preface
        if buffer[: len(preface)] != preface[: len(buffer)]:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self._preface = preface[len(buffer) :]
        del buffer[: len(preface)]
        return not self._preface

    def _check_first(self, kind: int) -> None:
        if kind != Kind.SETTINGS:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "settings come first")
        self._has_settings = True

    def _whole(self, new: Frame) -> Frame | None:
        """The frame with what makes it whole; None while more has to come."""
        begun = self._begun
        if begun is not None:
            if new.kind != Kind.CONTINUATION or new.stream_id != begun.stream_id:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "headers did not go on")
            # Empty frames count, too, or there would be no end to them.
            num_bytes = begun.num_bytes + HEAD.size + new.num_bytes
            longer = begun._replace(payload=begun.payload + new.payload, num_bytes=num_bytes)
            return self._headers(longer, new.flags)
        if new.kind == Kind.DATA:
            return new._replace(payload=_without_padding(new)) if new.flags & _PADDED else new
        if new.kind == Kind.HEADERS:
            block = _without_padding(new)
            if new.flags & _PRIORITY:
                if len(block) < _PRIORITY_BYTES:
                    raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "headers end in their priority")
                block = block[_PRIORITY_BYTES:]
            return self._headers(new._replace(payload=block), new.flags)
        if new.kind == Kind.CONTINUATION:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "there are no headers to go on with")
        return new

    def _headers(self, headers: Frame, last_flags: int) -> Frame | None:
        if headers.num_bytes > MAX_HEADER_BYTES:
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM, f"headers of over {MAX_HEADER_BYTES} bytes"
            )
        is_whole = last_flags & END_HEADERS
        self._begun = None if is_whole else headers
        return headers if is_whole else None


def _without_padding(padded: Frame) -> bytes:
    payload = padded.payload
    if not padded.flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]
