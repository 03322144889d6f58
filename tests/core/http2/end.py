"""One end of HTTP/2 without sockets, which keeps notes."""

from __future__ import annotations

from core.http2.base import Http2
from tests.core.http2.wire import frames_in


class RecordingEnd:
    """A listener that keeps what it is told, as `(what, stream, more...)`, and what is sent."""

    def __init__(self, kind: type[Http2], beginning: bytes, *, is_begun: bool):
        self.told = []
        self.num_rooms = 0
        self._sent = bytearray()
        self.http2 = kind(self, self._sent.extend)
        if is_begun:
            self.http2.receive(beginning)
            self.sent()

    def on_data(self, stream, data):
        self.told.append(("data", stream.id, data))

    def on_end(self, stream):
        self.told.append(("end", stream.id))

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
        return frames_in(self.sent())
