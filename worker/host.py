"""One worker process: what its service stands on, and the order of start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from baton.v1 import types_pb2
from core.errors import InternalError, Unavailable
from core.logs import event
from core.prefix_index import PrefixIndexWriter
from core.redis_client import connect_redis
from core.registry import Registry
from core.tasks import TaskSet
from core.tls import Tls
from core.tracing import Tracer
from engine.engine import Engine
from kvtransfer.base import Transport
from kvtransfer.digests import BlockDigests
from kvtransfer.peers import Identity, PeerDirectory
from kvtransfer.routes import UcxLog
from worker.convert import stats_to_proto
from worker.engine_loop import EngineLoop
from worker.links import LinkProbe, LinkWatch
from worker.metrics import WorkerCounters, WorkerFigures
from worker.outputs import OutputHub
from worker.role import RoleService
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
STOP_GRACE_S = 1.0
"""For telling peers that their exports are not needed any more."""


@dataclass(frozen=True)
class Parts:
    """What was built before the event loop's own parts."""

    engine: Engine
    device: ThreadPoolExecutor
    transport: Transport
    digests: BlockDigests
    identity: Identity
    tls: Tls | None = None
    """For calls between services; None: not encrypted."""
    ucx_log: UcxLog | None = None
    """Where UCX writes down which way KV moves; None: it does not."""
    tracer: Tracer = field(default_factory=Tracer)


class WorkerHost:
    """Owns every part of one worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        parts: Parts,
        set_serving: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`set_serving` changes what the gRPC health service answers."""
        self.settings = settings
        self.engine = parts.engine
        self.transport = parts.transport
        self.digests = parts.digests
        self.identity = parts.identity
        self.tracer = parts.tracer
        self.clock = time.monotonic
        self.tasks = TaskSet()
        self.fetch_numbers = itertools.count()
        """Of the prefixes that this worker fetches, which their owners know by them."""
        self.counters = WorkerCounters()
        self.state: types_pb2.WorkerState.ValueType = types_pb2.WORKER_STATE_STARTING
        self.address = ""
        self.peers = PeerDirectory(parts.identity, parts.transport, parts.tls)
        self.hub = OutputHub(lambda: (self.load(), self.state), self._on_router_lost)
        self.loop = EngineLoop(
            parts.engine.scheduler,
            parts.engine.runner,
            parts.device,
            self._after_step,
            self.counters,
            is_async=settings.schedules_ahead,
        )
        self._redis = connect_redis(settings.redis_url)
        self.registry = Registry(self._redis)
        self._set_serving = set_serving
        self.links = LinkWatch(
            settings.kv_require,
            LinkProbe(parts.transport, self.peers, parts.engine.pool, self.tasks, self._on_room),
            parts.ucx_log,
            self._update_state,
        )
        self._index = PrefixIndexWriter(
            self._redis,
            parts.identity.worker_id,
            parts.identity.epoch,
            parts.engine.pool.held_hashes,
        )
        self._is_exhausted = False
        self._is_draining = False
        self._service: RoleService | None = None
        self.vital: list[asyncio.Task[None]] = []
        """Tasks without which the worker is of no use; they end only by failing."""

    @property
    def service(self) -> RoleService:
        assert self._service is not None
        return self._service

    def require_ready(self) -> None:
        """Raises Unavailable when no new request may come here."""
        if not self.is_ready:
            reason = self.links.verdict.reason
            shown = f": {reason}" if reason else ""
            raise Unavailable(f"{self.identity.worker_id} takes no new requests{shown}")

    def install(self, service: RoleService) -> None:
        """What the worker is from now on; once."""
        self._service = service

    def start(self, address: str) -> None:
        """Begins to serve under `address`."""
        self.address = address
        self.state = self._state_now()
        self.vital = [
            self.tasks.start(self.loop.run(self.service)),
            self.tasks.start(self._heartbeat()),
            self.tasks.start(self._index.run()),
            self.tasks.start(self.links.run(self.registry, self.record)),
        ]
        event(logger, logging.INFO, "ready", worker_id=self.identity.worker_id, address=address)

    async def begin_draining(self) -> None:
        """Takes no new request from now on, and tells everybody."""
        self._is_draining = True
        await self._update_state()
        with contextlib.suppress(Unavailable):
            await self.registry.publish(self.record())

    async def _update_state(self) -> None:
        self.state = self._state_now()
        self.hub.report()
        await self._set_serving(self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Whether new requests may come here."""
        return self.state == types_pb2.WORKER_STATE_READY

    def _state_now(self) -> types_pb2.WorkerState.ValueType:
        if self._is_draining or self._is_exhausted:
            return types_pb2.WORKER_STATE_DRAINING
        # Not draining: routers would take that for a goodbye.
        is_kept = bool(self.links.verdict.reason)
        return types_pb2.WORKER_STATE_STARTING if is_kept else types_pb2.WORKER_STATE_READY

    async def stop(self) -> None:
        """Leaves the registry, ends every request, and frees what they hold."""
        self.state = types_pb2.WORKER_STATE_DRAINING
        with contextlib.suppress(Unavailable):
            await self.registry.remove(self.identity.worker_id, self.identity.epoch)
        self.hub.close()
        await self.tasks.cancel(STOP_GRACE_S)
        await self.peers.close()
        # A read from a stalled peer may never settle; what it writes to ends with the process.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self.transport.close()
        self.digests.close()
        await self._redis.aclose()
        await self.tracer.close()

    async def _heartbeat(self) -> None:
        """Every second: reaps, and publishes the worker's record."""
        was_ok = True
        while True:
            self.service.reap()
            await self._check_quarantine()
            self._note_cache_events()
            self.transport.set_num_exports(self.load().exports)
            try:
                await self.registry.publish(self.record())
                if not was_ok:
                    event(logger, logging.INFO, "registry_back")
                was_ok = True
            except Unavailable as error:
                if was_ok:
                    event(logger, logging.WARNING, "registry_away", error=error)
                was_ok = False
            await asyncio.sleep(HEARTBEAT_S)

    async def _check_quarantine(self) -> None:
        """Quarantine has no expiry, since bytes may land at any time; so it has a bound."""
        stats = self.engine.pool.stats()
        is_over = stats.quarantined > self.settings.max_quarantined_share * stats.total
        if is_over != self._is_exhausted:
            self._is_exhausted = is_over
            name = "quarantine_over_bound" if is_over else "quarantine_within_bound"
            event(logger, logging.ERROR, name, quarantined=stats.quarantined, total=stats.total)
            await self._update_state()
            if is_over:
                self.service.refuse_waiting(Unavailable("this worker is about to restart"))
        elif is_over and not self.engine.scheduler.has_work:
            raise InternalError(
                f"{stats.quarantined} of {stats.total} KV blocks wait for reads that never settle"
            )

    def _after_step(self) -> None:
        self._note_cache_events()
        self.service.on_room()

    def _on_room(self) -> None:
        self.service.on_room()

    def _note_cache_events(self) -> None:
        stored, removed = self.engine.pool.drain_events()
        if stored or removed:
            self._index.record(stored, removed)

    def _on_router_lost(self, router_id: str) -> None:
        event(logger, logging.INFO, "router_left", router_id=router_id)
        self.service.abort_router(router_id)

    def load(self) -> types_pb2.Load:
        """What this worker has to do now."""
        load = self.service.load()
        load.blocks.CopyFrom(stats_to_proto(self.engine.pool.stats()))
        return load

    def figures(self) -> WorkerFigures:
        """What a scrape of the metrics tells."""
        return WorkerFigures(
            load=self.load(),
            counters=self.counters,
            is_ready=self.is_ready,
            info={
                "worker": self.identity.worker_id,
                "role": types_pb2.Role.Name(self.service.role).removeprefix("ROLE_").lower(),
                "model_digest": self.identity.fingerprint.model,
                "kv_transport": self.transport.name,
            },
            kv_routes=self.links.verdict.routes,
            link_bytes_per_s=self.peers.link_speeds(),
        )

    def record(self) -> types_pb2.WorkerRecord:
        """This worker's entry in the registry."""
        return types_pb2.WorkerRecord(
            worker_id=self.identity.worker_id,
            role=self.service.role,
            address=self.address,
            epoch=self.identity.epoch,
            pid=os.getpid(),
            state=self.state,
            fingerprint=self.identity.fingerprint,
            max_model_len=self.engine.max_model_len,
            load=self.load(),
            reported_at_s=time.time(),
        )
