"""Puts a router together and runs it: settings → parts → serving → stopped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from baton.v1 import inference_pb2, inference_pb2_grpc
from core.errors import InvalidArgument, StartupError
from core.http_server import HttpServer
from core.model_folder import ModelFolder, config_digest, model_digest, resolve_model
from core.prefix_index import PrefixIndexReader
from core.redis_client import RedisClient, connect_redis
from core.registry import Registry
from core.rpc import settle_heap, wait_for_stop_signal
from core.tasks import TaskSet
from core.tls import load_tls
from core.tokenizer import Tokenizer
from core.tracing import make_tracer
from router.admission import Admission, AdmissionConfig
from router.admission_metrics import AdmissionMetrics
from router.breaker import Breaker
from router.deletion_cost import DeletionCosts, pod_namespace
from router.demand import Totals
from router.demand_board import DemandBoard
from router.demand_metrics import DemandMetrics
from router.demand_publisher import DemandPublisher, RouterIdentity
from router.demand_sampler import DemandSampler
from router.fallback import Fallback, FallbackConfig
from router.generation import Generation
from router.grpc_server.server import GrpcServer
from router.http.app import HttpApi
from router.http.protocol import StreamProtocol
from router.load_exchange import LoadExchange
from router.local_prefill import LocalPrefillLimit
from router.metrics import RouterGauges, RouterMetrics
from router.placement import Placer
from router.policies import make_policy
from router.prefix_hints import PrefixHints
from router.quotas import Quotas
from router.requests import RequestTable
from router.routing import RoutingCosts, RoutingCounters
from router.routing_metrics import RoutingMetrics
from router.service import InferenceService
from router.settings import RouterSettings
from router.tenant_file import TenantBook
from router.text_lane import TextBatch
from router.validate import ModelLimits, check_defaults
from router.workers import PoolConfig, WorkerPool

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
        self._pool = _pool(settings, self._redis, router_id, folder)
        self._breaker = Breaker()
        self._quotas = Quotas(self._redis, router_id, self._tasks)
        self._admission = _admission(settings, self._pool, self._quotas, rng)
        self._exchange = LoadExchange(self._redis, router_id, lambda: self._pool.links)
        limits = _model_limits(folder, settings.served_model_name)
        self._fallback = _fallback(settings, limits.served_name)
        generation = Generation(
            router_id=router_id,
            tokenizer=Tokenizer(folder),
            limits=limits,
            placer=_placer(settings, self._redis, self._pool, self._breaker, rng),
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
        identity = RouterIdentity(router_id, settings.release, limits.served_name, _digest(folder))
        self._demand = DemandPublisher(board, identity, self._admission, self._pool)
        self._table = RequestTable(generation, settings.client_stall_s)
        self._register_figures(generation)
        self._server = GrpcServer(settings.host, settings.port)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(self._table, generation, folder, settings.request_timeout_s),
            self._server,  # type: ignore[arg-type]
        )
        self._deployment = (identity.release, identity.model)
        self._sampler = DemandSampler(board.sums, time.monotonic)
        self._is_sampling = False
        timeout_s = settings.request_timeout_s
        self._http = _http(
            settings, HttpApi(self._table, generation, timeout_s, self._whole_demand)
        )

    async def _whole_demand(self) -> Totals:
        """Sampled from the first question on, since most deployments never ask."""
        if not self._is_sampling:
            self._is_sampling = True
            self._tasks.start(self._sampler.run())
        return await self._sampler.average(self._deployment)

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
        for part in (self._table, self._tenants, self._quotas, self._admission):
            self._tasks.start(part.run())
        for publisher in (self._exchange, self._demand):
            self._tasks.start(publisher.run())
        if (namespace := pod_namespace()) is not None:
            self._tasks.start(_keep_deletion_costs(self._pool, namespace))
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


async def _keep_deletion_costs(pool: WorkerPool, namespace: str) -> None:
    # Only in a cluster, since it takes a third of a second to import.
    from router.kubernetes_client import connect, write_deletion_cost

    api = await asyncio.to_thread(connect)

    async def write(pod: str, cost: int) -> None:
        await asyncio.to_thread(write_deletion_cost, api, namespace, pod, cost)

    await DeletionCosts(pool, write).run()


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


def _pool(
    settings: RouterSettings, redis: RedisClient, router_id: str, folder: ModelFolder
) -> WorkerPool:
    config = PoolConfig(
        router_id,
        settings.worker_silence_s,
        settings.worker_poll_s,
        model=_digest(folder) or config_digest(folder.path),
        tls=load_tls(settings),
    )
    return WorkerPool(Registry(redis), config)


def _admission(
    settings: RouterSettings, pool: WorkerPool, quotas: Quotas, rng: random.Random
) -> Admission:
    config = AdmissionConfig(
        settings.max_queued_requests, settings.prefill_ahead_s, settings.load_max_age_s
    )
    admission = Admission(config, pool, quotas, rng)
    pool.observe(admission)
    return admission


def _placer(
    settings: RouterSettings,
    redis: RedisClient,
    pool: WorkerPool,
    breaker: Breaker,
    rng: random.Random,
) -> Placer:
    # Equal weights: where a request goes does not depend on what can be pulled there, or
    # each prefix would soon be in every cache.
    costs = RoutingCosts(work=settings.prefix_weight, pull_block=settings.prefix_weight)
    return Placer(
        pool=pool,
        breaker=breaker,
        hints=PrefixHints(PrefixIndexReader(redis)),
        load_max_age_s=settings.load_max_age_s,
        policy=make_policy(settings.routing_policy, costs, rng),
        local_limit=LocalPrefillLimit(
            settings.local_prefill_max_tokens, settings.local_prefill_start_tokens
        ),
        counters=RoutingCounters(),
    )


def _http(settings: RouterSettings, api: HttpApi) -> HttpServer | None:
    if settings.http_port is None:
        return None
    app = api.asgi(settings.cors_origins.replace(",", " ").split())
    protocol = partial(StreamProtocol, batch=TextBatch())
    return HttpServer(app, settings.host, settings.http_port, protocol)


def _fallback(settings: RouterSettings, served_name: str) -> Fallback:
    """Raises StartupError when its key is missing."""
    if settings.fallback_url is None:
        return Fallback(None)
    key_env = settings.fallback_api_key_env
    api_key = os.environ.get(key_env) if key_env else None
    if key_env and not api_key:
        raise StartupError(f"the fallback's API key: variable {key_env} is not set")
    return Fallback(
        FallbackConfig(
            url=settings.fallback_url,
            api_key=api_key,
            model=settings.fallback_model or served_name,
            classes=frozenset(settings.fallback_classes),
        )
    )


def _digest(folder: ModelFolder) -> str | None:
    """The model's identity as its workers publish it; it takes weights to tell.

    From the hub a router has none, or those that a worker has fetched into their common cache.
    """
    try:
        return model_digest(folder.path)
    except StartupError:
        return None


def _model_limits(folder: ModelFolder, served_name: str | None) -> ModelLimits:
    """Raises StartupError."""
    limits = ModelLimits(
        served_name=served_name or folder.served_name,
        vocab_size=folder.vocab_size,
        max_model_len=folder.context_length,
        eos_token_ids=folder.eos_token_ids,
        defaults=folder.default_sampling,
    )
    try:
        check_defaults(limits)
    except InvalidArgument as error:
        path = folder.path / "generation_config.json"
        raise StartupError(f"{path}: {error.message}") from None
    return limits
