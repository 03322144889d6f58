"""The server: where it listens, what it serves, how it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from core.address import join_host_port
from core.health import Health
from core.http_server import listen
from router.grpc_server.connection import Connection, Shared
from router.grpc_server.method import End, Method

_CLOSE_GRACE_S = 1.0
"""For clients to take what has been sent, and for servicers to clean up."""
_SHUTTING_DOWN = End(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


class GrpcServer:
    """Serves without TLS. Give it to `add_XServicer_to_server` before `start`."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._shared = Shared()
        self._health = Health()
        self._server: asyncio.Server | None = None

    def add_generic_rpc_handlers(
        self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        """Part of what generated code expects of a server; the other part has all it tells."""

    def add_registered_method_handlers(
        self, service_name: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Adds the methods of a service."""
        for name, handler in handlers.items():
            path = f"/{service_name}/{name}"
            self._shared.methods[path] = Method.of(path, handler)

    async def start(self, service_names: Sequence[str]) -> str:
        """Listens and returns `host:port`; port 0 takes a free one. Raises StartupError."""
        self._health.add_to(self, service_names)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(names),  # type: ignore[attr-defined]
            self,
        )
        listener = listen(self._host, self._port)
        await self.set_serving(False)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._shared), sock=listener
        )
        return join_host_port(self._host, listener.getsockname()[1])

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers, for the server and for each service of it."""
        self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call and ends those in flight after `grace_s`.

        A later call may shorten the grace of an earlier one.
        """
        self._health.close()
        if self._server is not None:
            self._server.close()
        # Some may have been accepted, and come to be only in the loop's next turn.
        self._shared.is_stopping = True
        for connection in list(self._shared.connections):
            connection.go_away()
        await self._until_all_left(grace_s)
        for connection in list(self._shared.connections):
            connection.end_all(_SHUTTING_DOWN)
        await self._until_all_left(_CLOSE_GRACE_S)
        for connection in list(self._shared.connections):
            connection.abort()
        if self._shared.tasks:
            await asyncio.wait(self._shared.tasks, timeout=_CLOSE_GRACE_S)

    async def _until_all_left(self, timeout_s: float) -> None:
        """Or until `timeout_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._shared.connections:
                    self._shared.left.clear()
                    await self._shared.left.wait()
