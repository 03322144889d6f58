"""uvicorn in the router's own event loop: listens, serves the application, stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from core.errors import StartupError
from router.http.app import MAX_HEADER_BYTES
from router.http.errors import HttpError

_KEEP_ALIVE_S = 75
_STOP_GRACE_S = 2
_BACKLOG = 2048
PEER_NAME = "peer_common_name"


class HttpServer:
    """Serves `app` on `host`, over TLS with a context. Raises StartupError from `start`.

    With TLS the name that a client's certificate has been checked to have is in each request's
    state as PEER_NAME; None without a certificate.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            http=_BoundedHeaders if tls is None else _WithPeerName,
            ssl_context_factory=None if tls is None else (lambda *_: tls),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
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

    async def stop(self, grace_s: int = _STOP_GRACE_S) -> None:
        """Takes no new connection, and ends those that are open after `grace_s`."""
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _EmbeddedServer(uvicorn.Server):
    """One that leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _BoundedHeaders(HttpToolsProtocol):
    """Ends a connection whose headers do not end; those that do are measured by the app."""

    _num_header_bytes = 0
    _is_in_headers = True

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


class _WithPeerName(_BoundedHeaders):
    """Tells the application whom the client's certificate names."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        certificate = self.transport.get_extra_info("ssl_object").getpeercert() or {}
        names = [
            value
            for part in certificate.get("subject", ())
            for key, value in part
            if key == "commonName"
        ]
        self.scope["state"][PEER_NAME] = names[0] if names else None


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
