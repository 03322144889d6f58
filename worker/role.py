"""What prefill and decode each add to a worker: the host's view of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import grpc

from baton.v1 import types_pb2, worker_pb2
from core.errors import BatonError
from worker.engine_loop import StepObserver
from worker.requests import RequestKey


class RoleService(ABC, StepObserver):
    """What prefill and decode add to a worker. All calls come on the event loop."""

    role: types_pb2.Role.ValueType
    grpc_services: tuple[str, ...]
    """Full names of the services that `add_to_server` registers."""

    @abstractmethod
    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Registers the role's gRPC services."""

    @abstractmethod
    async def accept(self, assignment: worker_pb2.Assignment) -> None:
        """Takes one dispatch in. Raises a BatonError when it cannot be served here."""

    @abstractmethod
    def abort(self, key: RequestKey) -> None:
        """Ends one attempt and frees what it holds; also one that is still to come."""

    @abstractmethod
    def abort_choice(self, key: RequestKey, choice: int) -> None:
        """Ends one of an attempt's choices; nothing for an unknown one."""

    @abstractmethod
    def abort_router(self, router_id: str) -> None:
        """Ends everything that a router, which has left, dispatched."""

    def refuse_waiting(self, error: BatonError) -> None:
        """Fails the requests that have no blocks yet: they will not get any here."""

    def hand_over(self) -> None:
        """Gives back to the routers what they can go on with elsewhere."""

    @abstractmethod
    def on_room(self) -> None:
        """Blocks may have become free."""

    @abstractmethod
    def reap(self) -> None:
        """Ends what is over; called every second, with or without traffic."""

    @abstractmethod
    def load(self) -> types_pb2.Load:
        """The role's part of a load report; the host adds the blocks."""
