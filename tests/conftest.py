"""Fixtures that every package's tests may use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis

from core.redis_client import connect_redis
from tests.redis_server import RedisServer


def pytest_configure() -> None:
    """Properties are tried with the same examples each time, however long one of them takes."""
    settings.register_profile(
        "baton", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NIXL and ucxx each bring a copy of UCX, and both copies patch libc to hear of memory that is
    unmapped. No worker loads the two, so tests that load ucxx run in a process of their own."""
    for item in items:
        if "ucxx" in item.nodeid and "e2e" not in item.path.parts:
            item.add_marker("ucxx")


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """An empty Redis of the test's own."""
    server = RedisServer()
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of `redis_server`."""
    client = connect_redis(redis_server.url, timeout_s=30.0)  # a busy machine is no outage
    yield client
    await client.aclose()
