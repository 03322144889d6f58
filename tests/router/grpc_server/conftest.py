"""A server with a service of every kind of method, on the event loop of services: uvloop's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
import uvloop

from router.grpc_server.connection import Shared
from router.grpc_server.server import GrpcServer
from tests.router.grpc_server.raw import RawClient


class Probe:
    """A service without schemas: messages are bytes."""

    def __init__(self):
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        """Of Hold."""
        self.contexts = []

    async def Echo(self, request, context):
        self.contexts.append(context)
        return b"re: " + request

    async def Count(self, request, context):
        for number in range(int(request)):
            yield str(number).encode()

    async def Write(self, request, context):
        """So many messages of so many bytes."""
        num_messages, size = map(int, request.split())
        for number in range(num_messages):
            await context.write(str(number).encode().ljust(size))

    async def Total(self, requests, context):
        return str(sum([len(request) async for request in requests])).encode()

    async def Chat(self, requests, context):
        async for request in requests:
            yield b"re: " + request

    async def Hold(self, request, context):
        """Writes its request and waits to be ended."""
        self.started.set()
        try:
            await context.write(request)
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    def handlers(self):
        """By name."""
        return {
            "Echo": grpc.unary_unary_rpc_method_handler(self.Echo),
            "Count": grpc.unary_stream_rpc_method_handler(self.Count),
            "Write": grpc.unary_stream_rpc_method_handler(self.Write),
            "Total": grpc.stream_unary_rpc_method_handler(self.Total),
            "Chat": grpc.stream_stream_rpc_method_handler(self.Chat),
            "Hold": grpc.unary_stream_rpc_method_handler(self.Hold),
        }


@dataclass
class Running:
    """A server and grpcio's client of it."""

    address: str
    server: GrpcServer
    probe: Probe
    channel: grpc.aio.Channel

    @property
    def shared(self) -> Shared:
        return self.server._shared

    @property
    def connection(self):
        """The only one."""
        (connection,) = self.shared.connections
        return connection

    def unary(self, method="Echo"):
        return self.channel.unary_unary(f"/test.Probe/{method}")

    def stream(self, method):
        """Of answers."""
        return self.channel.unary_stream(f"/test.Probe/{method}")

    def uploads(self):
        return self.channel.stream_unary("/test.Probe/Total")

    def chat(self):
        return self.channel.stream_stream("/test.Probe/Chat")

    @asynccontextmanager
    async def raw(self, **beginning) -> AsyncIterator[RawClient]:
        """A client that has sent preface and settings."""
        client = await RawClient.connect(self.address, **beginning)
        try:
            yield client
        finally:
            await client.close()


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def serve():
    """`async with serve() as s`; more methods may be given. At its end nothing is left."""

    @asynccontextmanager
    async def serving(**methods) -> AsyncIterator[Running]:
        server, probe = GrpcServer("127.0.0.1", 0), Probe()
        server.add_registered_method_handlers("test.Probe", probe.handlers() | methods)
        address = await server.start(["test.Probe"])
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield Running(address, server, probe, channel)
        finally:
            await server.stop(0)
        assert server._shared.tasks == set()
        assert server._shared.connections == set()

    return serving
