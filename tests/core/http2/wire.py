"""Bytes of HTTP/2 and gRPC as they travel."""

from __future__ import annotations

import hpack

from core.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HEAD,
    NUMBER,
    SETTING,
    ErrorCode,
    Kind,
    frame,
)

INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5


def headers_frame(stream_id: int, headers: list[tuple[str, str]], flags: int = 0) -> bytes:
    """It uses no table of headers, so that it may be sent in any order."""
    literal = [hpack.NeverIndexedHeaderTuple(*pair) for pair in headers]
    return frame(Kind.HEADERS, END_HEADERS | flags, stream_id, hpack.Encoder().encode(literal))


def data_frame(stream_id: int, data: bytes, flags: int = END_STREAM) -> bytes:
    return frame(Kind.DATA, flags, stream_id, data)


def message(data: bytes) -> bytes:
    """As it stands in DATA frames."""
    return b"\0" + len(data).to_bytes(4, "big") + data


def frames_in(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of what was sent."""
    found = []
    while data:
        high, low, kind, flags, stream_id = HEAD.unpack_from(data)
        end = HEAD.size + (high << 8 | low)
        found.append((kind, flags, stream_id, data[HEAD.size : end]))
        data = data[end:]
    return found


def room_for(stream_id: int, num_bytes: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(num_bytes))


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def reset(stream_id: int, code: ErrorCode) -> tuple[int, int, int, bytes]:
    return (Kind.RST_STREAM, 0, stream_id, NUMBER.pack(code))
