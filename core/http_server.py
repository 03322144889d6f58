"""uvicorn in a service's own event loop: listens, serves the application, stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from core.address import is_ipv6, join_host_port
from core.errors import StartupError

_KEEP_ALIVE_S = 75
_STOP_GRACE_S = 2
_ABORT_AFTER_S = 1.0
"""After the grace, within which uvicorn should have ended by itself."""
_BACKLOG = 2048


class HttpServer:
    """Serves `app` on `host`, over TLS with a context. Raises StartupError from `start`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        protocol: Callable[..., asyncio.Protocol] = HttpToolsProtocol,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ssl_context_factory=None if tls is None else (lambda *_: tls),
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
        listener = listen(self._host, self._port)
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve(sockets=[listener]))
        # A connection made before uvicorn accepts waits in the backlog.
        return join_host_port(self._host, listener.getsockname()[1])

    async def stop(self, grace_s: int = _STOP_GRACE_S) -> None:
        """Takes no new connection, and ends those that are open after `grace_s`.

        A later call may shorten the grace of an earlier one.
        """
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        if self._serving is None:
            return
        done, _ = await asyncio.wait({self._serving}, timeout=grace_s + _ABORT_AFTER_S)
        if not done:
            # uvicorn goes by the grace of the first call.
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        await self._serving


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, for an event loop. Raises StartupError."""
    try:
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6(host) else socket.AF_INET,
            backlog=_BACKLOG,
            # As gRPC does: "::" is for IPv4, too.
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        address = join_host_port(host, port)
        raise StartupError(f"cannot listen on {address}: {reason}") from error
    listener.setblocking(False)
    return listener


class _EmbeddedServer(uvicorn.Server):
    """One that leaves signals to the process that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
