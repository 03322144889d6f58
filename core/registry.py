"""Worker registry in Redis: who serves, where, and in which life (epoch).

A worker publishes its record again and again under a lease; the router lists the records.
An absent record is a hint only: the router's own stream to a worker decides whether it lives.
"""

from __future__ import annotations

import logging
from typing import Any

from google.protobuf.message import DecodeError

from baton.v1 import types_pb2
from core.logs import event
from core.redis_client import RedisClient, redis_errors

logger = logging.getLogger(__name__)

# One hash tag, so that a script and an MGET may use all of them on a Redis Cluster.
_MEMBERS_KEY = "baton:{workers}"
_RECORD_PREFIX = "baton:{workers}:"

# A record is stored as `<epoch>:<protobuf>`, so that the script need not parse protobuf.
_REMOVE_SCRIPT = """
local record = redis.call('GET', KEYS[1])
if not record or string.sub(record, 1, #ARGV[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""


class Registry:
    """Records of workers, each with a lease of `lease_s` seconds."""

    def __init__(self, redis: RedisClient, lease_s: float = 5.0) -> None:
        self._redis = redis
        self._lease_ms = int(lease_s * 1000)
        self._remove = redis.register_script(_REMOVE_SCRIPT)

    async def publish(self, record: types_pb2.WorkerRecord) -> None:
        """Writes `record` and renews its lease. Raises Unavailable."""
        value = _fence(record.epoch) + record.SerializeToString()
        with redis_errors():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(_RECORD_PREFIX + record.worker_id, value, px=self._lease_ms)
                pipeline.sadd(_MEMBERS_KEY, record.worker_id)
                await pipeline.execute()

    async def remove(self, worker_id: str, epoch: int) -> None:
        """Removes the record if it is of this `epoch`, not of a later life. Raises Unavailable."""
        with redis_errors():
            await self._remove(
                keys=[_RECORD_PREFIX + worker_id, _MEMBERS_KEY],
                args=[_fence(epoch), worker_id],
            )

    async def list(self) -> list[types_pb2.WorkerRecord]:
        """All live records, by worker id; forgets members whose lease is over."""
        with redis_errors():
            members: list[Any] = sorted(await self._redis.smembers(_MEMBERS_KEY))
            if not members:
                return []
            values = await self._redis.mget([_RECORD_PREFIX.encode() + name for name in members])
            records = dict(zip(members, values, strict=True))
            dead = [name for name, value in records.items() if value is None]
            if dead:
                # A worker that published in between adds itself again with its next report.
                await self._redis.srem(_MEMBERS_KEY, *dead)
        parsed = [_parse(value) for value in records.values() if value is not None]
        return [record for record in parsed if record is not None]


def _fence(epoch: int) -> bytes:
    return f"{epoch}:".encode()


def _parse(value: bytes) -> types_pb2.WorkerRecord | None:
    """None for what is no record: Redis may be shared with others."""
    try:
        return types_pb2.WorkerRecord.FromString(value.partition(b":")[2])
    except DecodeError:
        event(logger, logging.WARNING, "record_unreadable", num_bytes=len(value))
        return None
