"""Where routers publish their part of the demand, for who sums it up.

Like the worker registry: one record for each router, under a lease of seconds, so that what is
old is gone rather than wrong.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.redis_client import RedisClient, redis_errors
from core.registry import Registry
from router.demand import Deployment, Totals, sum_up

LEASE_S = 5.0
# One hash tag, so that an MGET may use all of them on a Redis Cluster.
_MEMBERS_KEY = "baton:{demand}"
_RECORD_PREFIX = "baton:{demand}:"


class DemandBoard:
    """Records of routers, each with a lease of `lease_s` seconds."""

    def __init__(self, redis: RedisClient, lease_s: float = LEASE_S) -> None:
        self._redis = redis
        self._workers = Registry(redis)
        self._lease_ms = int(lease_s * 1000)

    async def publish(self, record: types_pb2.RouterDemand) -> None:
        """Writes `record` and renews its lease. Raises Unavailable."""
        with redis_errors():
            async with self._redis.pipeline(transaction=False) as pipeline:
                key = _RECORD_PREFIX + record.router_id
                pipeline.set(key, record.SerializeToString(), px=self._lease_ms)
                pipeline.sadd(_MEMBERS_KEY, record.router_id)
                await pipeline.execute()

    async def remove(self, router_id: str) -> None:
        """Takes a router's record away. Raises Unavailable."""
        with redis_errors():
            await self._redis.delete(_RECORD_PREFIX + router_id)
            await self._redis.srem(_MEMBERS_KEY, router_id)

    async def sums(self) -> dict[Deployment, Totals]:
        """The demand of every deployment. Raises Unavailable rather than tell a part of it."""
        routers = await self._routers()
        if not routers:
            raise Unavailable("no router has reported its demand")
        return sum_up(routers, await self._workers.list())

    async def _routers(self) -> list[types_pb2.RouterDemand]:
        with redis_errors():
            members: list[Any] = sorted(await self._redis.smembers(_MEMBERS_KEY))
            if not members:
                return []
            values: list[Any] = await self._redis.mget(
                [_RECORD_PREFIX.encode() + name for name in members]
            )
            records = dict(zip(members, values, strict=True))
            dead = [name for name, value in records.items() if value is None]
            if dead:
                # One that published in between adds itself again with its next record.
                await self._redis.srem(_MEMBERS_KEY, *dead)
        try:
            return [types_pb2.RouterDemand.FromString(v) for v in values if v is not None]
        except DecodeError:
            raise Unavailable("a router's demand cannot be read") from None
