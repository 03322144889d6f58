"""The client's side of HTTP/2 without sockets, and what servers send."""

from __future__ import annotations

from core.http2.base import encode_headers
from core.http2.frames import END_STREAM, Kind, frame
from router.grpc_client.http2 import ClientHttp2
from tests.core.http2 import wire
from tests.core.http2.end import RecordingEnd

BEGINNING = frame(Kind.SETTINGS, 0, 0, b"")
ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]


def headers_frame(headers=ANSWER, flags: int = 0) -> bytes:
    """Of the only call's answer."""
    return wire.headers_frame(1, headers, flags)


def trailers(*headers: tuple[str, str]) -> bytes:
    return headers_frame(list(headers or OK), END_STREAM)


def data_frame(data: bytes, flags: int = 0) -> bytes:
    return wire.data_frame(1, data, flags)


class Client(RecordingEnd):
    """A ClientHttp2 that keeps what it is told."""

    def __init__(self, *, is_begun=True):
        super().__init__(ClientHttp2, BEGINNING, is_begun=is_begun)

    def on_headers(self, stream, headers):
        self.told.append(("headers", stream.id, dict(headers)))

    def on_reset(self, stream, code):
        self.told.append(("reset", stream.id, code))

    def stream(self):
        """A new one, whose answer has begun."""
        stream = self.http2.open(encode_headers([(b":method", b"POST")]))
        self.http2.receive(wire.headers_frame(stream.id, ANSWER))
        self.sent()
        self.told.clear()
        return stream
