"""Servers to call: grpcio's, and raw ones that do what a test tells them. uvloop, as services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import uvloop

from core.http2.frames import PREFACE
from core.rpc import SERVER_OPTIONS
from core.tls import Tls
from router.grpc_client.call import Call
from router.grpc_client.connect import open_call
from router.grpc_client.status import CallFailed
from tests.core.http2.raw import RawPeer

PATIENCE_S = 30


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@dataclass
class Probe:
    """A service of one method, which answers each message and ends behind b"end"."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0

    async def Chat(self, requests, context):
        self.num_running += 1
        try:
            async for request in requests:
                if request == b"end":
                    return
                if request.startswith(b"fail: "):
                    await context.abort(grpc.StatusCode.ABORTED, request[6:].decode())
                yield b"re: " + request
        finally:
            self.num_running -= 1
            self.ended.set()


@asynccontextmanager
async def grpc_server(
    tls: Tls | None = None, host="127.0.0.1"
) -> AsyncIterator[tuple[str, Probe, grpc.aio.Server]]:
    """One of grpcio's, with a Probe."""
    probe, server = Probe(), grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(probe.Chat)
    server.add_registered_method_handlers("test.Probe", {"Chat": handler})
    if tls is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        port = server.add_secure_port(f"{host}:0", tls.server_credentials())
    await server.start()
    try:
        yield f"{host}:{port}", probe, server
    finally:
        await server.stop(0)


@asynccontextmanager
async def raw_server(act: Callable[[RawPeer], Awaitable[None]]) -> AsyncIterator[str]:
    """Does `act` with a client of which it has read the preface; ends when that is done."""
    tasks, peers = [], []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        peers.append(RawPeer(reader, writer))
        await reader.readexactly(len(PREFACE))
        await act(peers[-1])

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks)
        for peer in peers:
            await peer.close()


def called(address: str, tls: Tls | None = None, method="Chat"):
    """A call to a Probe."""
    return open_call(address, f"/test.Probe/{method}", tls, PATIENCE_S)


async def read_all(call: Call, timeout_s: float = PATIENCE_S) -> tuple[list[bytes], str]:
    """Messages until the end, and what that is."""
    messages = []
    try:
        while (message := await call.read(timeout_s)) is not None:
            messages.append(message)
    except CallFailed as failure:
        return messages, str(failure)
    return messages, "OK"


async def outcome(address: str, tls: Tls | None = None) -> tuple[list[bytes], str]:
    """Of a call that sends b"hello", as `read_all`."""
    try:
        async with called(address, tls) as call:
            call.send(b"hello")
            return await read_all(call)
    except CallFailed as failure:
        return [], str(failure)
