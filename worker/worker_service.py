"""The gRPC service that routers use on every worker: a stream for all that is said, and status."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.v1 import worker_pb2, worker_pb2_grpc
from core.errors import Unavailable, from_exception, to_detail
from worker.host import WorkerHost
from worker.role import RoleService


def install(host: WorkerHost, service: RoleService, server: grpc.aio.Server) -> None:
    """Makes `host` a worker of this role, with all of its gRPC services; before the server
    starts."""
    host.install(service)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(host), server)
    service.add_to_server(server)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The gRPC service that routers use on every worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Takes one router's assignments and streams what this worker makes of them.

        A router that means a former life at this address is refused: what it would dispatch
        names that life, too.
        """
        host = self._host
        attach = (await anext(requests, worker_pb2.RouterMessage())).attach
        if attach.epoch != host.identity.epoch:
            raise Unavailable(
                f"{host.identity.worker_id} is in life {host.identity.epoch}, not {attach.epoch}"
            )
        async with contextlib.aclosing(host.hub.attach(attach.router_id)) as messages:
            reading = host.tasks.start(self._read(requests))
            try:
                async for message in messages:
                    yield message
            finally:
                reading.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        """Ends with the stream, and with it what the router wanted and was not accepted yet."""
        accepting: set[asyncio.Task[None]] = set()
        try:
            async for message in requests:
                for assignment in message.assignments:
                    task = self._host.tasks.start(self._accept(assignment))
                    accepting.add(task)
                    task.add_done_callback(accepting.discard)
                for abort in message.aborts:
                    self._abort(abort)
        finally:
            for task in accepting:
                task.cancel()

    def _abort(self, abort: worker_pb2.AbortRequest) -> None:
        """Ends one attempt or one of its choices, in whatever phase it is."""
        key = (abort.request_id, abort.attempt)
        if abort.HasField("choice"):
            self._host.service.abort_choice(key, abort.choice)
        else:
            self._host.service.abort(key)

    async def _accept(self, assignment: worker_pb2.Assignment) -> None:
        """What is refused is reported like everything that becomes of an assignment."""
        dispatch, hub = assignment.dispatch, self._host.hub
        try:
            await self._host.service.accept(assignment)
        except Exception as error:
            output = worker_pb2.SequenceOutput(
                request_id=dispatch.request_id,
                attempt=dispatch.attempt,
                error=to_detail(from_exception(error)),
            )
            hub.publish(dispatch.router_id, output)
        else:
            hub.accepted(dispatch)

    async def GetWorkerStatus(
        self, request: worker_pb2.WorkerStatusRequest, context: Any
    ) -> worker_pb2.WorkerStatus:
        """This worker's state and, when asked for, the block audit."""
        host = self._host
        status = worker_pb2.WorkerStatus(
            id=host.identity.worker_id,
            role=host.service.role,
            address=host.address,
            pid=os.getpid(),
            epoch=host.identity.epoch,
            state=host.state,
            load=host.load(),
            kv_transport=host.transport.name,
            links_reason=host.links.verdict.reason,
        )
        if request.audit:
            errors = host.engine.scheduler.audit()
            status.audit.CopyFrom(worker_pb2.Audit(ok=not errors, errors=errors))
        return status
