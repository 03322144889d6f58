"""The server's end of an HTTP/2 connection: streams are begun by the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from core.http2.base import Headers, Http2, Listener, Setting, Stream
from core.http2.frames import PREFACE, ErrorCode, Http2Error

MAX_STREAMS = 10_000
"""That a client may have open at a time."""


class ServerListener(Listener, Protocol):
    """Is told of new streams, too."""

    def on_request(self, stream: Stream, headers: Headers) -> None:
        """A new stream. `stream.is_ended`: it has no data."""


class ServerHttp2(Http2):
    """A client's connection."""

    _listener: ServerListener

    def __init__(self, listener: ServerListener, send: Callable[[bytes], None]) -> None:
        self._last_taken_id: int | None = None
        """Once the client has been told that it is the last one."""
        super().__init__(listener, send, PREFACE, [(Setting.MAX_CONCURRENT_STREAMS, MAX_STREAMS)])

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool = False) -> None:
        """Sends encoded headers; the last ones end the stream, whatever the client still sends."""
        super().send_headers(stream, block, is_last=is_last)
        if not is_last:
            return
        if stream.is_ended:
            self.streams.pop(stream.id, None)
        else:
            self.reset(stream, ErrorCode.NO_ERROR)

    def go_away(self, code: ErrorCode) -> None:
        """Tells that streams after the last one until now are not looked at."""
        if self._last_taken_id is None:
            self._last_taken_id = self.last_stream_id
        self._send_go_away(self._last_taken_id, code)

    def _on_decoded(self, stream_id: int, headers: Headers, *, is_last: bool) -> None:
        if stream_id > self.last_stream_id:
            self._on_request(stream_id, headers, is_last=is_last)
            return
        stream = self._known(stream_id)
        if stream is None:
            return
        # Trailers, of which calls have no use.
        if stream.is_ended or not is_last:
            is_late = stream.is_ended
            self._fail(stream, ErrorCode.STREAM_CLOSED if is_late else ErrorCode.PROTOCOL_ERROR)
            return
        stream.is_ended = True
        self._end_if_whole(stream)

    def _on_request(self, stream_id: int, headers: Headers, *, is_last: bool) -> None:
        if stream_id % 2 == 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "clients' streams have odd numbers")
        self.last_stream_id = stream_id
        stream = Stream(stream_id)
        if len(self.streams) >= MAX_STREAMS:
            self.reset(stream, ErrorCode.REFUSED_STREAM)
            return
        self.streams[stream_id] = stream
        stream.is_ended = is_last
        self._listener.on_request(stream, headers)
        self._end_if_whole(stream)
