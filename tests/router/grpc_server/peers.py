"""Both sides of HTTP/2 without sockets: what clients send, and a server's side that keeps notes."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events

from core.http2.frames import PREFACE, Kind, frame
from router.grpc_server.http2 import ServerHttp2
from tests.core.http2 import wire
from tests.core.http2.end import RecordingEnd

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Probe/Echo"),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
BEGINNING = PREFACE + frame(Kind.SETTINGS, 0, 0, b"")


def request_to(method: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """Headers of a call to a method of test.Probe."""
    path = (":path", f"/test.Probe/{method}")
    return [path if name == ":path" else (name, value) for name, value in REQUEST] + [*more]


def headers_frame(stream_id: int, flags: int = 0, headers=REQUEST) -> bytes:
    """A request that uses no table of headers, so that it may be sent in any order."""
    return wire.headers_frame(stream_id, headers, flags)


def h2_client() -> h2.connection.H2Connection:
    """The h2 library in a client's part; its preface waits in `data_to_send`."""
    config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
    client = h2.connection.H2Connection(config)
    client.initiate_connection()
    return client


class Server(RecordingEnd):
    """A ServerHttp2 that keeps what it is told."""

    def __init__(self, *, is_begun=True):
        super().__init__(ServerHttp2, BEGINNING, is_begun=is_begun)

    def on_request(self, stream, headers):
        self.told.append(("request", stream.id))

    def on_reset(self, stream, code):
        self.told.append(("reset", stream.id))

    def stream(self, stream_id: int = 1, flags: int = 0):
        """A new one."""
        self.http2.receive(headers_frame(stream_id, flags))
        return self.http2.streams[stream_id]
