"""The client's side of HTTP/2 without sockets, and what servers send."""

from __future__ import annotations

from core.http2.base import encode_headers
from core.http2.frames import END_STREAM, Kind, frame
from router.grpc_client.http2 import ClientHttp2
from tests.core.http2 import wire

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


class Client:
    """A ClientHttp2 with a listener that keeps what it is told, as `(what, stream, more...)`."""

    def __init__(self, *, is_begun=True):
        self.told = []
        self.num_rooms = 0
        self._sent = bytearray()
        self.http2 = ClientHttp2(self, self._sent.extend)
        if is_begun:
            self.http2.receive(BEGINNING)
            self.sent()

    def on_headers(self, stream, headers):
        self.told.append(("headers", stream.id, dict(headers)))

    def on_data(self, stream, data):
        self.told.append(("data", stream.id, data))

    def on_end(self, stream):
        self.told.append(("end", stream.id))

    def on_reset(self, stream, code):
        self.told.append(("reset", stream.id, code))

    def on_room(self):
        self.num_rooms += 1

    def sent(self) -> bytes:
        """Since the last time."""
        data = bytes(self._sent)
        self._sent.clear()
        return data

    def answer(self, *data: bytes) -> list:
        """What is sent upon `data`, as frames."""
        self.http2.receive(b"".join(data))
        return wire.frames_in(self.sent())

    def stream(self):
        """A new one, whose answer has begun."""
        stream = self.http2.open(encode_headers([(b":method", b"POST")]))
        self.http2.receive(wire.headers_frame(stream.id, ANSWER))
        self.sent()
        self.told.clear()
        return stream
