"""How the router's HTTP server reads and writes a connection."""

from __future__ import annotations

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.http.app import MAX_HEADER_BYTES
from router.http.bodies import ChunkedBody, WriteBatch
from router.http.errors import HttpError

_END_OF_HEADERS = b"\r\n\r\n"


class StreamProtocol(HttpToolsProtocol):
    """Gives the application a `ChunkedBody` beside ASGI's `send`: `scope["baton.body"]`.

    Ends a connection whose headers do not end; those that do are measured by the application.
    """

    def __init__(self, *args: Any, batch: WriteBatch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch = batch
        self._num_header_bytes = 0
        self._is_in_headers = True
        self._has_begun = False
        """Whether a request began in the data that came last."""
        self._num_body_bytes = 0
        """In that data, of the body that came last."""
        self._unanswered: list[RequestResponseCycle] = []
        """The request that is served, and those that were sent behind it."""

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn tells the request that came last, which may not be the one that is served.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                cycle.scope["baton.body"].lost()  # type: ignore[typeddict-item]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        self._num_body_bytes = 0
        super().data_received(data)
        if not self._is_in_headers or self.transport.is_closing():
            return
        self._num_header_bytes += self._num_of_headers(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()

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
        self._num_body_bytes = 0
        # The application's task has been made, and begins after this callback.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["baton.body"] = ChunkedBody(self.cycle, self._batch)  # type: ignore[typeddict-unknown-key]
            unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
            self._unanswered = [*unanswered, self.cycle]


def _raw_response(error: HttpError) -> bytes:
    body = orjson.dumps(error.body)
    head = (
        f"HTTP/1.1 {error.status} Request Header Fields Too Large\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


_HEADERS_TOO_LARGE = _raw_response(
    HttpError(431, f"the headers have over {MAX_HEADER_BYTES} bytes", code="headers_too_large")
)
