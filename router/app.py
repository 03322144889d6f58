"""Puts a router together and runs it: settings → parts → serving → stopped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sys
import time
import uuid
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2, inference_pb2_grpc
from core.model_folder import ModelFolder, resolve_model
from core.redis_client import connect_redis
from core.rpc import settle_heap, wait_for_stop_signal
from core.tasks import TaskSet
from core.tokenizer import Tokenizer
from core.tracing import make_tracer
from router.admission_metrics import AdmissionMetrics
from router.breaker import Breaker
from router.deletion_cost import keep_deletion_costs, pod_namespace
from router.demand_board import DemandBoard
from router.demand_metrics import DemandMetrics
from router.demand_publisher import DemandPublisher, RouterIdentity
from router.demand_sampler import DemandSampler, DeploymentDemand
from router.generation import Generation
from router.grpc_server.server import GrpcServer
from router.http.app import HttpApi
from router.load_exchange import LoadExchange
from router.metrics import RouterGauges, RouterMetrics
from router.parts import make_admission, make_fallback, make_http, make_placer, make_pool
from router.quotas import Quotas
from router.requests import RequestTable
from router.routing_metrics import RoutingMetrics
from router.served_model import model_limits, published_digest
from router.service import InferenceService
from router.settings import RouterSettings
from router.tenant_file import TenantBook

_STOP_GRACE_S = 2.0
_SWITCH_S = 0.0005
"""After so long the event loop gets its turn from a thread that works on a long request."""
_SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


@dataclass(frozen=True)
class Addresses:
    """Where a router listens, each `host:port`."""

    grpc: str
    http: str | None

    def __str__(self) -> str:
        """As in the ready line."""
        return f"grpc={self.grpc}" + (f" http={self.http}" if self.http else "")


class Router:
    """One router: it listens after `start` and serves once workers of both roles are there.

    Construct it in a running event loop. Raises StartupError.
    """

    def __init__(self, settings: RouterSettings) -> None:
        folder = ModelFolder.load(resolve_model(settings.model, with_weights=False))
        self._tenants = TenantBook(settings.tenants, settings.api_keys)
        router_id = f"router-{uuid.uuid4().hex[:8]}"
        rng = random.Random()
        self._tracer = make_tracer(
            settings, "baton-router", router_id, settings.traces_sampling_ratio
        )
        self._redis = connect_redis(settings.redis_url)
        self._tasks = TaskSet()
        self._is_ready = asyncio.Event()
        self._is_draining = False
        self._pool = make_pool(settings, self._redis, router_id, folder)
        self._breaker = Breaker()
        self._quotas = Quotas(self._redis, router_id, self._tasks)
        self._admission = make_admission(settings, self._pool, self._quotas, rng)
        self._exchange = LoadExchange(self._redis, router_id, lambda: self._pool.links)
        limits = model_limits(folder, settings.served_model_name)
        self._fallback = make_fallback(settings, limits.served_name)
        generation = Generation(
            router_id=router_id,
            tokenizer=Tokenizer(folder),
            limits=limits,
            placer=make_placer(settings, self._redis, self._pool, self._breaker, rng),
            tenants=self._tenants,
            admission=self._admission,
            breaker=self._breaker,
            fallback=self._fallback,
            worker_wait_s=settings.worker_wait_s,
            rng=rng,
            metrics=RouterMetrics(CollectorRegistry()),
            tracer=self._tracer,
        )
        board = DemandBoard(self._redis)
        identity = RouterIdentity(
            router_id, settings.release, limits.served_name, published_digest(folder)
        )
        self._demand = DemandPublisher(board, identity, self._admission, self._pool)
        self._table = RequestTable(generation, settings.client_stall_s)
        self._register_figures(generation)
        self._server = GrpcServer(settings.host, settings.port)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(self._table, generation, folder, settings.request_timeout_s),
            self._server,  # type: ignore[arg-type]
        )
        sampler = DemandSampler(board.sums, time.monotonic)
        demand = DeploymentDemand(sampler, (identity.release, identity.model), self._tasks)
        api = HttpApi(self._table, generation, settings.request_timeout_s, demand.average)
        self._http = make_http(settings, api)

    def _register_figures(self, generation: Generation) -> None:
        """What Prometheus is told of the router's parts."""
        registry = generation.metrics.registry
        registry.register(RouterGauges(lambda: self._table.num_running, self._pool))
        registry.register(AdmissionMetrics(self._admission, self._fallback))
        registry.register(RoutingMetrics(generation.placer.counters))
        registry.register(DemandMetrics(self._demand.own))

    async def start(self) -> Addresses:
        """Listens and begins to look for workers. Raises StartupError."""
        grpc = await self._server.start([_SERVICE_NAME])
        http = await self._http.start() if self._http is not None else None
        self._tasks.start(self._pool.run())
        self._tasks.start(self._follow_readiness())
        for part in (self._table, self._tenants, self._quotas, self._admission.gate):
            self._tasks.start(part.run())
        for publisher in (self._exchange, self._demand):
            self._tasks.start(publisher.run())
        if (namespace := pod_namespace()) is not None:
            self._tasks.start(keep_deletion_costs(self._pool, namespace))
        return Addresses(grpc, http)

    async def wait_ready(self) -> None:
        """Returns when a worker of each role has been attached."""
        await self._is_ready.wait()

    async def drain(self, grace_s: float) -> None:
        """Takes no new call; returns when all requests have ended, or after `grace_s`."""
        if grace_s <= 0:
            return
        self._is_draining = True
        self._tasks.start(self._server.stop(grace_s))
        if self._http is not None:
            self._tasks.start(self._http.stop(math.ceil(grace_s)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._table.wait_empty()

    async def stop(self) -> None:
        """Ends what is in flight and closes everything within a few seconds.

        Workers drop this router's requests when their streams to it end.
        """
        await self._table.close()
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(_STOP_GRACE_S)
        await self._tasks.cancel(_STOP_GRACE_S)
        await self._fallback.close()
        await self._redis.aclose()
        await self._tracer.close()

    async def _follow_readiness(self) -> None:
        """Health is SERVING while there is a worker of each role."""
        while True:
            self._breaker.forget_all_but(link.worker_id for link in self._pool.links)
            if not self._is_draining:
                await self._server.set_serving(self._pool.is_ready)
            if self._pool.is_ready:
                self._is_ready.set()
            await self._pool.wait_changed()


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGINT or SIGTERM, and until it is drained. Prints one `ready` line.

    Raises StartupError.
    """
    stop = asyncio.get_running_loop().create_task(wait_for_stop_signal())
    sys.setswitchinterval(_SWITCH_S)
    router = Router(settings)
    try:
        addresses = await router.start()
        ready = asyncio.get_running_loop().create_task(router.wait_ready())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            settle_heap()
            sys.stdout.write(f"ready {addresses}\n")
            sys.stdout.flush()
        ready.cancel()
        await stop
        await _drain(router, settings.drain_timeout_s)
    finally:
        await router.stop()


async def _drain(router: Router, grace_s: float) -> None:
    """Until it is done, or a second signal comes."""
    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(router.drain(grace_s)), loop.create_task(wait_for_stop_signal())}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
