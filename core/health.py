"""The gRPC health service (grpc/grpc, doc/health-checking.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_States = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """What a server answers for itself and for each of its services.

    grpcio-health-checking's own servicer holds a lock while it writes to who watches, so that one
    client that does not read would stop whoever sets a state: a server's heartbeat and its end.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""
        self._is_closed = False

    def add_to(self, server: Any, service_names: Sequence[str]) -> None:
        """Has `server` answer for itself (the name "") and for each service of it."""
        self._states = dict.fromkeys(("", *service_names), _States.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set_serving(self, is_serving: bool) -> None:
        """What is answered from now on, unless the service is closed."""
        if not self._is_closed:
            state = _States.SERVING if is_serving else _States.NOT_SERVING
            self._states = dict.fromkeys(self._states, state)
            self._changed.set()
            self._changed = asyncio.Event()

    def close(self) -> None:
        """NOT_SERVING for good."""
        self.set_serving(False)
        self._is_closed = True

    async def Check(self, request: Any, context: Any) -> Any:
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: Any, context: Any) -> None:
        """Writes the state, and each that differs from what was written last."""
        last = None
        while True:
            changed = self._changed
            state = self._states.get(request.service, _States.SERVICE_UNKNOWN)
            if state != last:
                last = state
                await context.write(health_pb2.HealthCheckResponse(status=state))
            await changed.wait()
