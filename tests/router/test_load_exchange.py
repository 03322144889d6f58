"""Routers tell each other what they have sent to workers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from core.errors import Unavailable
from core.redis_client import connect_redis
from router import load_exchange
from router.load_exchange import LoadExchange, packed, summed
from router.predicted_load import PredictedLoad
from router.routing import Work
from tests.router.stack import PATIENCE_S, wait_for


@dataclass
class Link:
    """A worker as one router knows it."""

    worker_id: str = "decode-0"
    epoch: int = 7
    predicted: PredictedLoad = field(default_factory=PredictedLoad)


@pytest.fixture(autouse=True)
def long_lease(monkeypatch):
    """No router counts as silent because the test is slow."""
    monkeypatch.setattr(load_exchange, "LEASE_S", 600.0)


@asynccontextmanager
async def router(redis_server, name, *links):
    client = connect_redis(redis_server.url, PATIENCE_S)
    try:
        yield LoadExchange(client, name, lambda: links)
    finally:
        await client.aclose()


def sent(*works):
    """A worker to which one router has sent this."""
    link = Link()
    for number, work in enumerate(works):
        link.predicted.add(number, work)
    return link


async def test_each_router_reads_the_sum_of_what_the_others_have_sent(redis_server):
    links = [sent(Work(1, 2, 3)), sent(Work(10, 20, 30)), sent(Work(100, 200, 300))]
    async with (
        router(redis_server, "a", links[0]) as a,
        router(redis_server, "b", links[1]) as b,
        router(redis_server, "c", links[2]) as c,
    ):
        for each in (a, b, c, a):
            await each.exchange()
    assert links[0].predicted.others == Work(110, 220, 330)
    assert links[0].predicted.own == Work(1, 2, 3)
    assert links[0].predicted.total == Work(111, 222, 333)
    # It was not told what it has sent itself, nor what c told after its own call.
    assert links[1].predicted.others == Work(1, 2, 3)


async def test_a_router_that_falls_silent_does_not_count_for_long(redis_server, monkeypatch):
    link = Link()
    async with (
        router(redis_server, "dead", sent(Work(9, 1, 9))) as dead,
        router(redis_server, "a", link) as alive,
    ):
        await dead.exchange()
        await alive.exchange()
        assert link.predicted.others.queued_blocks == 9
        monkeypatch.setattr(load_exchange, "LEASE_S", 0.1)
        await dead.exchange()
        await asyncio.sleep(0.15)
        await alive.exchange()
    assert link.predicted.others == Work()


async def test_what_was_sent_to_a_former_life_of_a_worker_does_not_count(redis_server):
    later = Link(epoch=8)
    async with (
        router(redis_server, "a", sent(Work(9, 1, 9))) as a,
        router(redis_server, "b", later) as b,
    ):
        await a.exchange()
        await b.exchange()
    assert later.predicted.others == Work()


async def test_without_redis_a_router_goes_by_its_own_numbers(redis_server, monkeypatch):
    monkeypatch.setattr(load_exchange, "_PAUSE_S", 0.01)
    link = sent(Work(1, 1, 1))
    link.predicted.others = Work(5, 5, 5)
    async with router(redis_server, "a", link) as a:
        redis_server.kill()
        with pytest.raises(Unavailable):
            await a.exchange()
        running = asyncio.create_task(a.run())
        await wait_for(lambda: link.predicted.others == Work())
        redis_server.start()
        async with router(redis_server, "b", sent(Work(2, 2, 2))) as b:
            await b.exchange()
            await wait_for(lambda: link.predicted.others == Work(2, 2, 2))
        running.cancel()
    assert link.predicted.own == Work(1, 1, 1)


def test_a_report_counts_instead_of_what_others_have_told():
    predicted = PredictedLoad()
    predicted.others = Work(5, 1, 5)
    predicted.reported([])
    assert predicted.total == Work()


def test_only_what_can_be_read_counts():
    load = sent(Work(1, 1, 1)).predicted
    told = packed({("decode-0", 7): load, ("decode-1", 7): PredictedLoad()})
    assert told == b'[["decode-0",7,1.0,1.0,1.0]]'
    assert summed([b"later version", told, b'[["decode-0",7]]', told]) == {
        ("decode-0", 7): Work(2, 2, 2)
    }
