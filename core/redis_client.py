"""Connecting to Redis: a server, TLS, Sentinel or Cluster, all by one URL.

    redis://[user:password@]host[:port][/db]         one server; rediss:// with TLS
    redis+sentinel://host[:port],…/service[/db]      the primary that Sentinels name
    redis+cluster://host[:port],…                    a Redis Cluster

rediss+sentinel:// and rediss+cluster:// use TLS for every connection. A query adds options of
redis-py, such as ?ssl_ca_certs=/path/ca.pem; user and password are those of the data servers,
and Sentinels that want a password are given ?sentinel_password= (and ?sentinel_username=).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from core.errors import StartupError, Unavailable

RedisClient = Redis | RedisCluster

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379


def connect_redis(url: str, timeout_s: float = 0.5) -> RedisClient:
    """A client whose every call ends within about `timeout_s`: no retries, short timeouts.

    (Looking for a Sentinel or a node of a Cluster that answers may take as long for each.)
    Connects on first use. Raises StartupError when `url` cannot be understood.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        # A managed cloud's feature, asked for with one more round trip by default.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        # redis-py's name and version, which it looks up on disk for each connection.
        "driver_info": None,
    }
    try:
        parts = urlsplit(url)
        scheme, _, topology = parts.scheme.partition("+")
        if topology == "sentinel":
            return _connect_sentinel(parts, scheme, options)
        if topology == "cluster":
            return _connect_cluster(parts, scheme, options)
        return _checked(Redis.from_url(url, **options))
    except (ValueError, TypeError, RedisClusterException) as error:
        raise StartupError(f"redis url {redacted(url)!r} is not understood: {error}") from error


def redacted(url: str) -> str:
    """`url` without passwords."""
    without_user = re.sub(r"//[^/@]*@", "//***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", without_user)


@contextmanager
def redis_errors() -> Iterator[None]:
    """Translates everything that a Redis call raises to Unavailable.

    While it connects, redis-py loses a cancellation that comes at the wrong moment; it is
    raised here again, or the task could never be stopped.
    """
    task = asyncio.current_task()
    num_cancels = task.cancelling() if task else 0
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise Unavailable(f"redis: {type(error).__name__}: {error}") from error
    finally:
        if task and task.cancelling() > num_cancels:
            raise asyncio.CancelledError


class _SentinelRedis(Redis):
    """Owns the clients of the Sentinels, too."""

    connection_pool: Any

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self.connection_pool.sentinel_manager.aclose()


def _connect_sentinel(parts: SplitResult, scheme: str, options: dict[str, Any]) -> Redis:
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the path must name the service: redis+sentinel://host:26379/service")
    url_options = _url_options(parts, scheme)
    sentinel_options = options | {
        name: value for name, value in url_options.items() if name.startswith("ssl")
    }
    for name in ("username", "password"):
        sentinel_options[name] = url_options.pop(f"sentinel_{name}", None)
    # redis-py has no types here.
    make_sentinel: Any = Sentinel
    sentinel = make_sentinel(
        _nodes(parts, _SENTINEL_PORT),
        sentinel_kwargs=sentinel_options,
        **options,
        **url_options,
        db=int(db or 0),
    )
    return _checked(sentinel.master_for(service, redis_class=_SentinelRedis))


def _connect_cluster(parts: SplitResult, scheme: str, options: dict[str, Any]) -> RedisCluster:
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a Redis Cluster has only database 0")
    nodes = [ClusterNode(host, port) for host, port in _nodes(parts, _REDIS_PORT)]
    return RedisCluster(startup_nodes=nodes, **options, **_url_options(parts, scheme))


def _url_options(parts: SplitResult, scheme: str) -> dict[str, Any]:
    """User, password, TLS and the query of a URL with several hosts, as arguments of redis-py."""
    credentials, at, _ = parts.netloc.rpartition("@")
    query = f"?{parts.query}" if parts.query else ""
    options: dict[str, Any] = dict(parse_url(f"{scheme}://{credentials}{at}host{query}"))
    del options["host"]
    if options.pop("connection_class", None):
        options["ssl"] = True
    return options


def _nodes(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    nodes = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        node = urlsplit(f"//{address}")
        if not node.hostname:
            raise ValueError(f"{address!r} is no host:port")
        nodes.append((node.hostname, node.port or default_port))
    return nodes


def _checked(client: Redis) -> Redis:
    """Raises TypeError for an option that no connection understands; connects to nothing."""
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return client
