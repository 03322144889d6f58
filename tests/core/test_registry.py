import asyncio

import pytest

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.redis_client import connect_redis
from core.registry import Registry


def record(worker_id="p0", epoch=1, **fields):
    return types_pb2.WorkerRecord(worker_id=worker_id, epoch=epoch, **fields)


async def test_published_records_are_listed_by_worker_id(redis):
    registry = Registry(redis)
    await registry.publish(record("p1", epoch=10, address="h:1"))
    await registry.publish(record("d0", epoch=-3))

    assert await registry.list() == [record("d0", epoch=-3), record("p1", epoch=10, address="h:1")]


async def test_an_empty_registry_lists_nothing(redis):
    assert await Registry(redis).list() == []


async def test_a_record_disappears_when_its_lease_is_over(redis):
    registry = Registry(redis, lease_s=0.05)
    await registry.publish(record("p0"))
    await asyncio.sleep(0.1)

    assert await registry.list() == []
    assert await redis.smembers("baton:{workers}") == set()


async def test_a_record_that_cannot_be_read_is_left_out(redis):
    registry = Registry(redis)
    await registry.publish(record("p0"))
    await redis.sadd("baton:{workers}", "odd")
    await redis.set("baton:{workers}:odd", "1:\xff")

    assert [found.worker_id for found in await registry.list()] == ["p0"]


async def test_only_its_own_epoch_removes_a_record(redis):
    registry = Registry(redis)
    await registry.publish(record("p0", epoch=12))

    await registry.remove("p0", epoch=1)
    assert [found.epoch for found in await registry.list()] == [12]
    await registry.remove("p0", epoch=12)
    assert await registry.list() == []


async def test_a_dead_redis_is_reported(redis_server, redis):
    registry = Registry(redis)
    redis_server.kill()

    with pytest.raises(Unavailable, match="redis"):
        await registry.list()
    with pytest.raises(Unavailable):
        await registry.publish(record())
    with pytest.raises(Unavailable):
        await registry.remove("p0", 1)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_redis_that_does_not_answer_is_asked_once(is_silent):
    num_asked = 0

    async def answer_nothing(reader, writer):
        nonlocal num_asked
        num_asked += 1
        if is_silent:
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(answer_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = connect_redis(f"redis://127.0.0.1:{port}/0", timeout_s=0.2)
    with pytest.raises(Unavailable):
        await Registry(client).list()
    await client.aclose()
    server.close()
    await server.wait_closed()
    assert num_asked == 1
