"""What both ends of an HTTP/2 connection do (RFC 9113; numbers below are its sections).

As much of it as calls need: no push (8.4), no priorities (5.3.2, deprecated). What is sent is
handed to a function; what is received, to a `Listener`. Headers are compressed by the hpack
library; those that are sent never enter its table, so that those which every call has are
constant bytes.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import hpack

from core.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_NUMBER,
    NUMBER,
    SETTING,
    ErrorCode,
    Frame,
    FrameReader,
    Http2Error,
    Kind,
    frame,
)
from core.http2.windows import ReceiveWindow

Headers = Iterable[tuple[bytes, bytes]]

STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 16 << 20
_DEFAULT_WINDOW = 65_535
_PING_BYTES = 8
_MIN_MAX_FRAME_BYTES, _MAX_MAX_FRAME_BYTES = 1 << 14, (1 << 24) - 1
_NO_TABLE = b"\x20"
"""Before encoded headers: the table that they may enter has no room from now on (RFC 7541, 6.3)."""
_ENCODER = hpack.Encoder()


class Setting(IntEnum):
    """What a side tells of itself (6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Stream:
    """One request and its response."""

    __slots__ = ("id", "is_ended", "receive_window", "send_credit")

    def __init__(self, stream_id: int) -> None:
        self.id = stream_id
        self.is_ended = False
        """Whether the peer has sent everything."""
        self.send_credit = 0
        """What the peer has made room for beyond the initial window, less what was sent.

        So a peer that changes the initial window does it for any number of streams at once.
        """
        self.receive_window = ReceiveWindow(STREAM_WINDOW)


class Listener(Protocol):
    """Is told what comes. Streams that were reset or ended are not spoken of again."""

    def on_data(self, stream: Stream, data: bytes) -> None:
        """A part of a request or an answer; it is to be given back with `consumed`."""

    def on_end(self, stream: Stream) -> None:
        """The request or the answer is whole."""

    def on_reset(self, stream: Stream, code: int) -> None:
        """It has ended before its end: the peer's doing, or the peer's fault."""

    def on_room(self) -> None:
        """More may be sent, on some stream."""


def encode_headers(headers: Headers) -> bytes:
    """For `send_headers`."""
    return _ENCODER.encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in headers])


class Http2(ABC):
    """One connection of `listener`, which holds it.

    `send` gets bytes in the order in which they are to go out. `preface` is what the peer begins
    with; `settings` are told beside those that both ends have.
    """

    def __init__(
        self,
        listener: Listener,
        send: Callable[[bytes], None],
        preface: bytes,
        settings: Iterable[tuple[Setting, int]],
    ) -> None:
        self.streams: dict[int, Stream] = {}
        """Those that are open on either side, by id."""
        self.last_stream_id = 0
        self.send_window = _DEFAULT_WINDOW
        """For data of all streams together."""
        self.initial_window = _DEFAULT_WINDOW
        """A stream's window is this and its credit, and may be negative (6.9.2)."""
        self.max_frame_bytes = _MIN_MAX_FRAME_BYTES
        """Of what is sent."""
        self._must_tell_table = False
        """Whether the next headers are to say how large their table is (RFC 7541, 4.2)."""
        # Which holds this: a connection that is lost is not to wait for the garbage collector.
        self._listener = weakref.proxy(listener)
        self._send = send
        self._reader = FrameReader(preface)
        self._receive_window = ReceiveWindow(CONNECTION_WINDOW)
        self._decoder = hpack.Decoder(MAX_HEADER_BYTES)
        told = (
            *settings,
            (Setting.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
            (Setting.MAX_FRAME_SIZE, MAX_FRAME_BYTES),
            (Setting.MAX_HEADER_LIST_SIZE, MAX_HEADER_BYTES),
        )
        self._send_frame(Kind.SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in told))
        self._send_room(0, CONNECTION_WINDOW - _DEFAULT_WINDOW)

    def receive(self, data: bytes) -> None:
        """Takes what has come. Raises Http2Error."""
        for received in self._reader.feed(data):
            handler = self._HANDLERS.get(received.kind)
            if handler is not None:
                handler(self, received)

    def room(self, stream: Stream) -> int:
        """How many bytes of data the peer takes now, in one frame."""
        window = self.initial_window + stream.send_credit
        return min(self.send_window, window, self.max_frame_bytes)

    def send_data(self, stream: Stream, data: bytes) -> None:
        """`data` must not be more than there is room for. It runs for every token."""
        size = len(data)
        self.send_window -= size
        stream.send_credit -= size
        self._send(HEAD.pack(size >> 8, size & 0xFF, Kind.DATA, 0, stream.id) + data)

    def send_headers(self, stream: Stream, block: bytes, *, is_last: bool = False) -> None:
        """Sends encoded headers; behind the last ones this side has nothing more to send."""
        flags = END_HEADERS | END_STREAM if is_last else END_HEADERS
        if self._must_tell_table:
            self._must_tell_table = False
            block = _NO_TABLE + block
        for start in range(0, len(block), self.max_frame_bytes):
            piece = block[start : start + self.max_frame_bytes]
            has_more = start + len(piece) < len(block)
            kind = Kind.CONTINUATION if start else Kind.HEADERS
            if start:
                flags = END_HEADERS
            self._send_frame(kind, flags & ~END_HEADERS if has_more else flags, stream.id, piece)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Ends a stream at once."""
        self.streams.pop(stream.id, None)
        self._send_frame(Kind.RST_STREAM, 0, stream.id, NUMBER.pack(code))

    def consumed(self, stream: Stream, num_bytes: int) -> None:
        """So much of a stream's data has been dealt with: as much more may come."""
        self._consumed(num_bytes)
        increment = stream.receive_window.consumed(num_bytes)
        if increment and not stream.is_ended and stream.id in self.streams:
            self._send_room(stream.id, increment)

    def ping(self) -> None:
        """Asks for a sign of life: whatever comes."""
        self._send_frame(Kind.PING, 0, 0, bytes(_PING_BYTES))

    @abstractmethod
    def go_away(self, code: ErrorCode) -> None:
        """Tells that the connection takes no more streams of the peer's, and why."""

    @abstractmethod
    def _on_decoded(self, stream_id: int, headers: Headers, *, is_last: bool) -> None:
        """Headers have come. The last ones end what the peer has to send on the stream."""

    def _send_go_away(self, last_stream_id: int, code: ErrorCode) -> None:
        self._send_frame(Kind.GOAWAY, 0, 0, NUMBER.pack(last_stream_id) + NUMBER.pack(code))

    def _send_frame(self, kind: Kind, flags: int, stream_id: int, payload: bytes) -> None:
        self._send(frame(kind, flags, stream_id, payload))

    def _send_room(self, stream_id: int, num_bytes: int) -> None:
        self._send_frame(Kind.WINDOW_UPDATE, 0, stream_id, NUMBER.pack(num_bytes))

    def _consumed(self, num_bytes: int) -> None:
        increment = self._receive_window.consumed(num_bytes)
        if increment:
            self._send_room(0, increment)

    def _on_data(self, received: Frame) -> None:
        size = received.num_bytes
        if not self._receive_window.take(size):
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than there is room for")
        stream = self._known(received.stream_id)
        if stream is None:
            self._consumed(size)
            return
        if stream.is_ended or not stream.receive_window.take(size):
            self._consumed(size)
            is_late = stream.is_ended
            self._fail(stream, ErrorCode.STREAM_CLOSED if is_late else ErrorCode.FLOW_CONTROL_ERROR)
            return
        data = received.payload
        if len(data) < size:
            self.consumed(stream, size - len(data))
        stream.is_ended = bool(received.flags & END_STREAM)
        if data:
            self._listener.on_data(stream, data)
        self._end_if_whole(stream)

    def _on_headers(self, received: Frame) -> None:
        # Whatever becomes of them: later headers go by what these put into the table.
        try:
            headers = self._decoder.decode(received.payload, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, str(error)) from None
        except hpack.HPACKError as error:
            raise Http2Error(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        self._on_decoded(received.stream_id, headers, is_last=bool(received.flags & END_STREAM))

    def _end_if_whole(self, stream: Stream) -> None:
        """Tells of the end, unless the stream has ended on this side or was reset meanwhile."""
        if stream.is_ended and stream.id in self.streams:
            self._listener.on_end(stream)

    def _on_reset(self, received: Frame) -> None:
        if received.num_bytes != NUMBER.size:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
        stream = self._known(received.stream_id)
        if stream is not None:
            del self.streams[stream.id]
            self._listener.on_reset(stream, NUMBER.unpack(received.payload)[0])

    def _fail(self, stream: Stream, code: ErrorCode) -> None:
        self.reset(stream, code)
        self._listener.on_reset(stream, code)

    def _known(self, stream_id: int) -> Stream | None:
        """None for one that has ended. Raises Http2Error for one that has not begun."""
        if not 0 < stream_id <= self.last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"there is no stream {stream_id}")
        return self.streams.get(stream_id)

    def _on_settings(self, received: Frame) -> None:
        if received.stream_id != 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "settings are of the connection")
        is_answer = bool(received.flags & ACK)
        if received.num_bytes % SETTING.size or (is_answer and received.num_bytes):
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "settings have 6 bytes each")
        if is_answer:
            return
        for name, value in SETTING.iter_unpack(received.payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_NUMBER:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"a window of {value} bytes")
                self.initial_window = value
            elif name == Setting.MAX_FRAME_SIZE:
                if not _MIN_MAX_FRAME_BYTES <= value <= _MAX_MAX_FRAME_BYTES:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frames of {value} bytes")
                self.max_frame_bytes = value
            elif name == Setting.HEADER_TABLE_SIZE:
                # A peer that allows less than before asks to be told; all may be.
                self._must_tell_table = True
        self._send_frame(Kind.SETTINGS, ACK, 0, b"")
        self._listener.on_room()

    def _on_window_update(self, received: Frame) -> None:
        if received.num_bytes != NUMBER.size:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        increment = NUMBER.unpack(received.payload)[0] & MAX_NUMBER
        if received.stream_id == 0:
            if increment == 0:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "room for nothing")
            self.send_window += increment
            if self.send_window > MAX_NUMBER:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"room for {increment} bytes more")
        else:
            stream = self._known(received.stream_id)
            if stream is None:
                return
            stream.send_credit += increment
            if increment == 0:
                self._fail(stream, ErrorCode.PROTOCOL_ERROR)
                return
            if self.initial_window + stream.send_credit > MAX_NUMBER:
                self._fail(stream, ErrorCode.FLOW_CONTROL_ERROR)
                return
        self._listener.on_room()

    def _on_ping(self, received: Frame) -> None:
        if received.stream_id != 0:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "pings are of the connection")
        if received.num_bytes != _PING_BYTES:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a ping has 8 bytes")
        if not received.flags & ACK:
            self._send_frame(Kind.PING, ACK, 0, received.payload)

    def _on_push_promise(self, received: Frame) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "push is not taken")

    _HANDLERS: ClassVar[dict[int, Callable[[Any, Frame], None]]] = {
        Kind.DATA: _on_data,
        Kind.HEADERS: _on_headers,
        Kind.RST_STREAM: _on_reset,
        Kind.SETTINGS: _on_settings,
        Kind.PUSH_PROMISE: _on_push_promise,
        Kind.PING: _on_ping,
        Kind.WINDOW_UPDATE: _on_window_update,
    }
