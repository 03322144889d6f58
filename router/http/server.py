"""uvicorn in the router's own event loop: listens, serves the application, stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from core.errors import StartupError
from router.http.app import MAX_HEADER_BYTES
from router.http.errors import HttpError

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_STOP_GRACE_S = 2
_BACKLOG = 2048


class HttpServer:
    """Serves `app` on `host`. Raises StartupError from `start`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            http=partial(_Protocol, batch=WriteBatch()),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
        )
        self._server = _EmbeddedServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens and returns `host:port`; port 0 takes a free one."""
        is_ipv6 = ":" in self._host
        shown_host = f"[{self._host}]" if is_ipv6 else self._host
        try:
            listener = socket.create_server(
                (self._host, self._port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            reason = error.strerror or error
            raise StartupError(f"cannot listen on {shown_host}:{self._port}: {reason}") from error
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve(sockets=[listener]))
        # A connection made before uvicorn accepts waits in the backlog.
        return f"{shown_host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Takes no new connection, and ends those that are open within a few seconds."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _EmbeddedServer(uvicorn.Server):
    """One that leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WriteBatch:
    """What many responses are to send, written in one go at the end of the loop's turn.

    One write after the other, with nothing computed between, finds the clients awake: waking
    a process costs more than the rest of a write.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, data: bytes) -> None:
        """To be sent soon, in order."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((cycle, data))

    def flush(self) -> None:
        """Sends what waits."""
        waiting, self._waiting = self._waiting, []
        for cycle, data in waiting:
            if cycle.disconnected:
                continue
            try:
                cycle.transport.write(data)
            except Exception:  # others wait behind it
                logger.exception("a response cannot be written")
                cycle.transport.abort()


class ChunkedBody:
    """A response's body on its way to the socket, past ASGI and its coroutines.

    For a response whose headers have been sent, without a content-length.
    """

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._batch = batch

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        """Sends a text as JSON between `before` and `after`, soon; it runs for every token.

        It returns False when the client does not keep up: ASGI's `send` waits until it does.
        """
        cycle, flow, add, dumps = self._cycle, self._flow, self._batch.add, orjson.dumps
        num_bytes = len(before) + len(after)
        after += b"\r\n"

        def write(text: str) -> bool:
            data = dumps(text)
            add(cycle, b"%x\r\n%b%b%b" % (num_bytes + len(data), before, data, after))
            return not flow.write_paused

        return write

    def flush(self) -> None:
        """To be called before ASGI's `send`, so that all keeps its order."""
        self._batch.flush()


class _Protocol(HttpToolsProtocol):
    """Gives the application a `ChunkedBody` beside ASGI's `send`: `scope["baton.body"]`.

    Ends a connection whose headers do not end; those that do are measured by the application.
    """

    def __init__(self, *args: Any, batch: WriteBatch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch = batch
        self._num_header_bytes = 0
        self._is_in_headers = True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_in_headers or self.transport.is_closing():
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.write(_HEADERS_TOO_LARGE)
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:
            super().on_header(name, value)
            return
        # Trailers of a chunked body, which nobody reads.
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = 0
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_in_headers = False
        # The application's task has been made, and begins after this callback.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["baton.body"] = ChunkedBody(self.cycle, self._batch)  # type: ignore[typeddict-unknown-key]


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
