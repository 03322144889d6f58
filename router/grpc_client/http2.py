"""The client's end of an HTTP/2 connection: streams are begun here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from core.http2.base import Headers, Http2, Listener, Setting, Stream
from core.http2.frames import NUMBER, PREFACE, ErrorCode, Frame, Http2Error, Kind

_GOAWAY_BYTES = 8
_MAX_REASON_BYTES = 200


class ClientListener(Listener, Protocol):
    """Is told of answers' headers, too."""

    def on_headers(self, stream: Stream, headers: Headers) -> None:
        """An answer's headers or, if `stream.is_ended`, its last ones."""


class ClientHttp2(Http2):
    """A connection to a server; streams may be opened before anything comes from it."""

    _listener: ClientListener

    def __init__(self, listener: ClientListener, send: Callable[[bytes], None]) -> None:
        self.goodbye: str | None = None
        """Why the server takes no more streams, once it has said so."""
        send(PREFACE)
        super().__init__(listener, send, b"", [(Setting.ENABLE_PUSH, 0)])

    def open(self, block: bytes) -> Stream:
        """Begins a stream with encoded headers."""
        self.last_stream_id += 2 if self.last_stream_id else 1
        stream = self.streams[self.last_stream_id] = Stream(self.last_stream_id)
        self.send_headers(stream, block)
        return stream

    def go_away(self, code: ErrorCode) -> None:
        """Tells why the connection ends."""
        self._send_go_away(0, code)

    def _on_decoded(self, stream_id: int, headers: Headers, *, is_last: bool) -> None:
        stream = self._known(stream_id)
        if stream is None:
            return
        if stream.is_ended:
            self._fail(stream, ErrorCode.STREAM_CLOSED)
            return
        stream.is_ended = is_last
        self._listener.on_headers(stream, headers)
        self._end_if_whole(stream)

    def _on_go_away(self, received: Frame) -> None:
        """Streams up to the one that is named go on."""
        if received.stream_id != 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "GOAWAY is of the connection")
        payload = received.payload
        if len(payload) < _GOAWAY_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has 8 bytes or more")
        last_stream_id, code = (number for (number,) in NUMBER.iter_unpack(payload[:_GOAWAY_BYTES]))
        reason = payload[_GOAWAY_BYTES:][:_MAX_REASON_BYTES].decode(errors="replace")
        self.goodbye = f"{name_of(code)} {reason}".rstrip()
        for stream in [each for each in self.streams.values() if each.id > last_stream_id]:
            del self.streams[stream.id]
            self._listener.on_reset(stream, ErrorCode.REFUSED_STREAM)

    _HANDLERS = Http2._HANDLERS | {Kind.GOAWAY: _on_go_away}


def name_of(code: int) -> str:
    """Of an error code that a server has sent."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"
