"""Connects to a server, encrypted or not, and calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from core.address import split_host_port
from core.errors import StartupError
from core.tls import Tls
from router.grpc_client.call import Call
from router.grpc_client.status import CallFailed, request_headers


@asynccontextmanager
async def open_call(
    address: str, method: str, tls: Tls | None, timeout_s: float
) -> AsyncIterator[Call]:
    """Calls `method` (`/package.Service/Method`) at `address` (`host:port`); closed in the end.

    Raises CallFailed, and TimeoutError when there is no connection after `timeout_s`.
    """
    authority = address if tls is None else tls.name
    call = Call(request_headers(method, authority, is_encrypted=tls is not None))
    try:
        async with asyncio.timeout(timeout_s):
            await _connect(call, address, tls)
    except BaseException:
        # uvloop may leave a connection open when it is cancelled as the handshake ends.
        call.abort()
        raise
    try:
        call.keep_alive()
        yield call
    finally:
        await call.close()


async def _connect(call: Call, address: str, tls: Tls | None) -> None:
    try:
        host, port = split_host_port(address)
        # Anew for each connection: the files may have been replaced.
        context = None if tls is None else await asyncio.to_thread(tls.client_context)
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: call,
            host,
            port,
            ssl=context,
            server_hostname=None if tls is None else tls.name,
        )
    except TimeoutError:
        raise
    except (OSError, ValueError, StartupError) as error:
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"{address}: {error}") from error
    tls_object = transport.get_extra_info("ssl_object")
    if tls_object is not None and tls_object.selected_alpn_protocol() != "h2":
        raise CallFailed(grpc.StatusCode.UNAVAILABLE, f"{address} does not speak HTTP/2")
