"""How the router's HTTP server reads and writes a connection."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.app import MAX_HEADER_BYTES
from router.http.bodies import ChunkedBody
from router.http.errors import HttpError
from router.text_lane import TextBatch

HEAD_TIMEOUT_S = 60.0
"""A connection on which no whole head of a request comes for so long is closed."""
_END_OF_HEADERS = b"\r\n\r\n"


class StreamProtocol(HttpToolsProtocol):
    """Gives the application a `ChunkedBody` beside ASGI's `send`: `scope["baton.body"]`.

    Ends a connection whose headers do not end; those that do are measured by the application.
    """

    def __init__(self, *args: Any, batch: TextBatch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self, self)
        self._batch = batch
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._head_since: float | None = None
        """When what is there of a head began to come (event loop time)."""
        self._has_begun = False
        """Whether a request began in the data that came last."""
        self._num_body_bytes = 0
        """In that data, of the body that came last."""
        self._unanswered: list[RequestResponseCycle] = []
        """The request that is served, and those that were sent behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_without_head()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells the request that came last, which may not be the one that is served.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                cycle.scope["baton.body"].lost()  # type: ignore[typeddict-item]
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        for cycle in self._unanswered:
            cycle.scope["baton.body"].full()  # type: ignore[typeddict-item]

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        self._num_body_bytes = 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._is_in_headers:
            if self.cycle is not None and self.cycle.response_complete:
                self._close_without_head()
            return
        self._num_header_bytes += self._num_of_headers(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()
        else:
            self._close_without_head()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says as plain text to what is no HTTP."""
        self.transport.write(_raw_response(HttpError(400, msg, code="invalid_http")))
        self.transport.close()

    def _close_without_head(self) -> None:
        """In time; the next data call it off (it takes the place of uvicorn's keep-alive)."""
        now = self.loop.time()
        self._head_since = now if self._head_since is None else self._head_since
        left_s = max(0.0, self._head_since + HEAD_TIMEOUT_S - now)
        self.timeout_keep_alive_task = self.loop.call_later(left_s, self._head_is_late)

    def _head_is_late(self) -> None:
        # Behind a request that is being served, its end sets the keep-alive's own timer.
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_handler()

    def _num_of_headers(self, data: bytes) -> int:
        """Bytes of `data` that belong to headers which have not ended.

        Where these begin in it, others' headers and a body may come before.
        """
        if not self._has_begun:
            return len(data)
        last_end = data.rfind(_END_OF_HEADERS)
        start = 0 if last_end < 0 else last_end + len(_END_OF_HEADERS)
        return max(0, len(data) - start - self._num_body_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:
            super().on_header(name, value)
            return
        # Trailers of a chunked body, which nobody reads.
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def ignore_upgrade(self) -> _Parser:
        """The parser from now on: of the data behind a head that asks for another protocol."""
        framing = (b"content-length", b"transfer-encoding")
        head = [b"%b: %b\r\n" % field for field in self.headers if field[0] in framing]
        self.parser = parser = _Parser(_BehindHead(self), self)
        parser.feed_piece(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(head))
        return parser

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_body_bytes += len(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._has_begun = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_in_headers = False
        self._head_since = None
        self._num_body_bytes = 0
        # The application's task has been made, and begins after this callback.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["baton.body"] = ChunkedBody(self.cycle, self._batch)  # type: ignore[typeddict-unknown-key]
            unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
            self._unanswered = [*unanswered, self.cycle]


class _Parser(httptools.HttpRequestParser):
    """Tells `callbacks` what it finds. Nobody can lead it to another protocol.

    httptools stops behind a head with `Upgrade`, body or not. A server may ignore the wish (RFC
    9110, section 7.8), which Java's own client, for one, sends with all it asks: for HTTP/2.
    """

    def __init__(self, callbacks: Any, protocol: StreamProtocol) -> None:
        super().__init__(callbacks)
        # As uvicorn's own: what comes behind a request that is the last one is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        parser, rest = self, memoryview(data)
        while rest:
            try:
                parser.feed_piece(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                parser = self._protocol.ignore_upgrade()

    def feed_piece(self, data: Any) -> None:
        """Raises HttpParserUpgrade behind a head that asks for another protocol."""
        super().feed_data(data)


class _BehindHead:
    """Callbacks of a parser that is shown again how the body of a known head is framed."""

    def __init__(self, protocol: StreamProtocol) -> None:
        self._protocol = protocol
        self._is_known = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._is_known:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_known:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_known:
            self._protocol.on_headers_complete()
        self._is_known = False


def _raw_response(error: HttpError) -> bytes:
    body = orjson.dumps(error.body)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


_HEADERS_TOO_LARGE = _raw_response(
    HttpError(431, f"the headers have over {MAX_HEADER_BYTES} bytes", code="headers_too_large")
)
