"""The parts of a router that its settings shape, each made of the few settings that it needs.

So no part knows the router's settings as a whole. Nothing connects or listens yet.
"""

from __future__ import annotations

import os
import random
from functools import partial

from core.errors import StartupError
from core.http_server import HttpServer
from core.model_folder import ModelFolder, config_digest
from core.prefix_index import PrefixIndexReader
from core.redis_client import RedisClient
from core.registry import Registry
from core.tls import load_tls
from router.admission import Admission, AdmissionConfig
from router.breaker import Breaker
from router.fallback import Fallback, FallbackConfig
from router.http.app import HttpApi
from router.http.protocol import StreamProtocol
from router.local_prefill import LocalPrefillLimit
from router.placement import Placer
from router.policies import make_policy
from router.prefix_hints import PrefixHints
from router.quotas import Quotas
from router.routing import RoutingCosts, RoutingCounters
from router.served_model import published_digest
from router.settings import RouterSettings
from router.text_lane import TextBatch
from router.workers import PoolConfig, WorkerPool


def make_pool(
    settings: RouterSettings, redis: RedisClient, router_id: str, folder: ModelFolder
) -> WorkerPool:
    """The workers that serve the model of `folder`."""
    config = PoolConfig(
        router_id,
        settings.worker_silence_s,
        settings.worker_poll_s,
        model=published_digest(folder) or config_digest(folder.path),
        tls=load_tls(settings),
    )
    return WorkerPool(Registry(redis), config)


def make_admission(
    settings: RouterSettings, pool: WorkerPool, quotas: Quotas, rng: random.Random
) -> Admission:
    """Admission to the workers of `pool`, of which it hears from now on."""
    config = AdmissionConfig(
        settings.max_queued_requests, settings.prefill_ahead_s, settings.load_max_age_s
    )
    admission = Admission(config, pool, quotas, rng)
    pool.observe(admission)
    return admission


def make_placer(
    settings: RouterSettings,
    redis: RedisClient,
    pool: WorkerPool,
    breaker: Breaker,
    rng: random.Random,
) -> Placer:
    """The choice of workers, by the policy that the settings name."""
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


def make_http(settings: RouterSettings, api: HttpApi) -> HttpServer | None:
    """The server of the HTTP API; None where it is not wanted."""
    if settings.http_port is None:
        return None
    app = api.asgi(settings.cors_origins.replace(",", " ").split())
    protocol = partial(StreamProtocol, batch=TextBatch())
    return HttpServer(app, settings.host, settings.http_port, protocol)


def make_fallback(settings: RouterSettings, served_name: str) -> Fallback:
    """The endpoint for what no pod can serve. Raises StartupError when its key is missing."""
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
