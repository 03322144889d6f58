"""Puts a router together and runs it: settings → parts → serving → stopped."""

from __future__ import annotations

import asyncio
import random
import sys
import uuid

from baton.v1 import inference_pb2, inference_pb2_grpc
from core.model_folder import ModelFolder, model_digest, resolve_model
from core.prefix_index import PrefixIndexReader
from core.registry import Registry, connect_redis
from core.rpc import RpcServer, wait_for_stop_signal
from core.tasks import TaskSet
from core.tokenizer import Tokenizer
from router.local_prefill import LocalPrefillLimit
from router.placement import Placer
from router.policies import make_policy
from router.prefix_hints import PrefixHints
from router.request import Generation
from router.requests import RequestTable
from router.routing import RoutingCosts, RoutingCounters
from router.service import InferenceService
from router.settings import RouterSettings
from router.validate import ModelLimits
from router.workers import PoolConfig, WorkerPool

_STOP_GRACE_S = 2.0
_SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class Router:
    """One router: it listens after `start` and serves once workers of both roles are there.

    Construct it in a running event loop. Raises StartupError.
    """

    def __init__(self, settings: RouterSettings) -> None:
        folder = ModelFolder.load(resolve_model(settings.model))
        router_id = f"router-{uuid.uuid4().hex[:8]}"
        rng = random.Random()
        self._redis = connect_redis(settings.redis_url)
        self._tasks = TaskSet()
        self._is_ready = asyncio.Event()
        self._pool = WorkerPool(
            Registry(self._redis),
            PoolConfig(
                router_id,
                settings.worker_silence_s,
                settings.worker_poll_s,
                model=_digest(folder),
            ),
        )
        placer = Placer(
            pool=self._pool,
            hints=PrefixHints(PrefixIndexReader(self._redis)),
            load_max_age_s=settings.load_max_age_s,
            policy=make_policy(settings.routing_policy, RoutingCosts(settings.prefix_weight), rng),
            local_limit=LocalPrefillLimit(settings.local_prefill_max_tokens),
            counters=RoutingCounters(),
        )
        generation = Generation(
            router_id=router_id,
            tokenizer=Tokenizer(folder),
            limits=_model_limits(folder, settings.served_model_name),
            placer=placer,
            worker_wait_s=settings.worker_wait_s,
            tasks=self._tasks,
            rng=rng,
        )
        self._table = RequestTable(generation)
        self._server = RpcServer(settings.host, settings.port)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(self._table, generation, folder, settings.request_timeout_s),
            self._server.grpc_server,
        )

    async def start(self) -> str:
        """Listens, begins to look for workers, and returns `host:port`. Raises StartupError."""
        address = await self._server.start([_SERVICE_NAME])
        self._tasks.start(self._pool.run())
        self._tasks.start(self._follow_readiness())
        return address

    async def wait_ready(self) -> None:
        """Returns when a worker of each role has been attached."""
        await self._is_ready.wait()

    async def stop(self) -> None:
        """Ends what is in flight and closes everything within a few seconds.

        Workers drop this router's requests when their streams to it end.
        """
        await self._table.close()
        await self._server.stop(_STOP_GRACE_S)
        await self._tasks.cancel(_STOP_GRACE_S)
        await self._redis.aclose()

    async def _follow_readiness(self) -> None:
        """Health is SERVING while there is a worker of each role."""
        while True:
            await self._server.set_serving(self._pool.is_ready)
            if self._pool.is_ready:
                self._is_ready.set()
            await self._pool.wait_changed()


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGINT or SIGTERM. Prints one `ready` line. Raises StartupError."""
    stop = asyncio.get_running_loop().create_task(wait_for_stop_signal())
    router = Router(settings)
    try:
        address = await router.start()
        ready = asyncio.get_running_loop().create_task(router.wait_ready())
        await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            sys.stdout.write(f"ready grpc={address}\n")
            sys.stdout.flush()
        ready.cancel()
        await stop
    finally:
        await router.stop()


def _digest(folder: ModelFolder) -> str | None:
    """The model's identity as its workers publish it; it takes weights to tell."""
    has_weights = any(folder.path.glob("*.safetensors"))
    return model_digest(folder.path) if has_weights else None


def _model_limits(folder: ModelFolder, served_name: str | None) -> ModelLimits:
    return ModelLimits(
        served_name=served_name or folder.served_name,
        vocab_size=folder.vocab_size,
        max_model_len=folder.context_length,
        eos_token_ids=folder.eos_token_ids,
        defaults=folder.default_sampling,
    )
