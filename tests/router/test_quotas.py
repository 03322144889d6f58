"""Quotas over all routers, and on one's own while Redis is away."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import redis

from core.errors import ResourceExhausted, Unavailable
from core.redis_client import connect_redis
from core.tasks import TaskSet
from router.buckets import Bucket
from router.quotas import Charge, Quotas
from router.tenants import Quota, ServiceClass, Tenant
from tests.router.stack import PATIENCE_S, wait_for


def tenant(**limits):
    return Tenant("acme", "silver", ServiceClass(share=1.0), Quota(**limits))


@asynccontextmanager
async def router(redis_server, router_id="r0"):
    """One router's quotas."""
    client, tasks = connect_redis(redis_server.url, PATIENCE_S), TaskSet()
    try:
        yield Quotas(client, router_id, tasks)
    finally:
        await tasks.cancel(1)
        await client.aclose()


async def refused(quotas, who, member="late", num_tokens=1):
    with pytest.raises(ResourceExhausted) as caught:
        await quotas.take(who, member, num_tokens)
    return caught.value


def assert_waits(error, wait_s, started):
    """The client is told to wait so long from `started` on, or a moment longer."""
    assert wait_s <= error.retry_after_s + time.monotonic() - started
    assert error.retry_after_s <= wait_s + 0.01


async def test_requests_a_second_are_counted_over_all_routers(redis_server):
    who = tenant(requests_per_s=0.01)
    async with router(redis_server, "r0") as first, router(redis_server, "r1") as second:
        await first.take(who, "a", 1)
        error = await refused(second, who)
    assert error.field == "requests_per_s"
    assert 50 < error.retry_after_s <= 100
    assert "tenant acme is over its quota: requests_per_s is 0.01" in error.message


async def test_tokens_are_charged_as_expected_and_corrected_in_the_end(redis_server):
    who, started = tenant(tokens_per_min=1000), time.monotonic()
    async with router(redis_server) as quotas:
        charge = await quotas.take(who, "a", 900)
        error = await refused(quotas, who, num_tokens=500)
        assert error.field == "tokens_per_min"
        assert_waits(error, 400 * 60 / 1000, started)
        quotas.settle(charge, 100)
        await wait_for(lambda: not quotas._tasks._tasks)
        await quotas.take(who, "b", 800)


async def test_a_request_of_more_than_a_minutes_tokens_gets_a_full_bucket_and_leaves_a_debt(
    redis_server,
):
    who, started = tenant(tokens_per_min=600), time.monotonic()
    async with router(redis_server) as quotas:
        await quotas.take(who, "a", 6000)
        error = await refused(quotas, who)
    assert_waits(error, 540.1, started)


async def test_requests_in_flight_are_counted_until_they_are_settled(redis_server):
    who = tenant(max_concurrent=1)
    async with router(redis_server, "r0") as first, router(redis_server, "r1") as second:
        charge = await first.take(who, "a", 1)
        assert (await refused(second, who)).field == "max_concurrent"
        first.settle(charge, 1)
        await wait_for(lambda: not first._tasks._tasks)
        await second.take(who, "b", 1)


async def test_what_a_dead_router_had_in_flight_is_forgotten(redis_server, monkeypatch):
    who = tenant(max_concurrent=1)
    async with router(redis_server, "r0") as dead, router(redis_server, "r1") as alive:
        await dead.take(who, "a", 1)
        await refused(alive, who)
        monkeypatch.setattr("router.quotas.LEASE_S", 0.2)
        await dead._renew()
        await asyncio.sleep(0.3)
        await alive.take(who, "b", 1)


async def test_what_is_in_flight_for_long_keeps_its_lease(redis_server, monkeypatch):
    monkeypatch.setattr("router.quotas.LEASE_S", 0.2)
    who = tenant(max_concurrent=1)
    async with router(redis_server) as quotas:
        charge = await quotas.take(who, "a", 1)
        monkeypatch.setattr("router.quotas.LEASE_S", 600.0)
        await quotas._renew()
        await asyncio.sleep(0.3)
        assert (await refused(quotas, who)).field == "max_concurrent"
        quotas.settle(charge, 1)


async def test_a_request_settled_while_leases_are_renewed_does_not_come_back(redis_server):
    who = tenant(max_concurrent=1)
    async with router(redis_server) as quotas:
        charge = await quotas.take(who, "a", 1)
        renew = quotas._renew_script

        async def settle_then_renew(keys, args):
            if "a" in args:
                quotas.settle(charge, 1)
                await wait_for(lambda: not quotas._tasks._tasks)
            return await renew(keys=keys, args=args)

        quotas._renew_script = settle_then_renew
        await quotas._renew()
        await quotas.take(who, "b", 1)


async def test_a_refused_request_is_charged_nothing(redis_server):
    who = tenant(requests_per_s=1000, tokens_per_min=100, max_concurrent=1)
    async with router(redis_server) as quotas:
        charge = await quotas.take(who, "a", 40)
        for number in range(5):
            assert (await refused(quotas, who, f"b{number}", 40)).field == "max_concurrent"
        quotas.settle(charge, 40)
        await wait_for(lambda: not quotas._tasks._tasks)
        await quotas.take(who, "c", 60)


async def test_each_router_has_its_share_while_redis_is_away(redis_server):
    who = tenant(tokens_per_min=1000, max_concurrent=4)
    async with router(redis_server, "r0") as quotas, router(redis_server, "r1") as other:
        await other._renew()
        await quotas._renew()
        redis_server.kill()
        charge = await quotas.take(who, "a", 500)
        error = await refused(quotas, who, num_tokens=250)
        assert error.field == "tokens_per_min"
        quotas.settle(charge, 200)
        charges = [await quotas.take(who, "b", 100), await quotas.take(who, "c", 100)]
        assert (await refused(quotas, who, num_tokens=1)).field == "max_concurrent"
        for charge in charges:
            quotas.settle(charge, 0)


async def test_a_paused_redis_delays_one_request_in_a_while(redis_server, monkeypatch):
    monkeypatch.setattr("router.quotas._TIMEOUT_S", 0.2)
    monkeypatch.setattr("router.quotas._PAUSE_S", 600.0)
    who, asked = tenant(requests_per_s=1000), []
    async with router(redis_server) as quotas:
        take = quotas._take_script
        quotas._take_script = lambda **given: asked.append(given) or take(**given)
        redis_server.pause()
        for number in range(10):
            await quotas.take(who, f"b{number}", 1)
    assert len(asked) == 1


async def test_requests_that_began_without_redis_count_when_it_is_back(redis_server):
    who = tenant(max_concurrent=1)
    async with router(redis_server) as quotas, router(redis_server, "r1") as other:
        redis_server.kill()
        charge = await quotas.take(who, "a", 1)
        redis_server.start()
        await quotas._renew()
        assert (await refused(other, who)).field == "max_concurrent"
        quotas.settle(charge, 1)


async def test_a_request_is_charged_once_however_often_redis_is_asked(redis_server):
    who = tenant(tokens_per_min=1000)
    async with router(redis_server) as quotas:
        for _ in range(2):
            await quotas.take(who, "a", 500)
        await quotas.take(who, "b", 500)


@pytest.mark.parametrize("ends", ["at once", "later", "not"])
async def test_what_redis_took_without_saying_so_is_given_back(redis_server, ends):
    who = tenant(tokens_per_min=1000)
    async with router(redis_server) as quotas, router(redis_server, "r1") as other:
        await quotas._renew()
        script = quotas._take_script

        async def take_and_say_nothing(**given):
            await script(**given)
            raise TimeoutError

        quotas._take_script = take_and_say_nothing
        charge = await quotas.take(who, "a", 900)
        if ends == "later":
            quotas._resume_at = 0.0
        if ends != "not":
            quotas.settle(charge, 900)
            await wait_for(lambda: not quotas._tasks._tasks)
        if ends != "later":
            await quotas._renew()
        await other.take(who, "b", 900)


async def test_nothing_is_given_back_that_was_never_taken(redis_server):
    who = tenant(tokens_per_min=1000)
    async with router(redis_server) as quotas:
        await quotas.take(who, "a", 900)
        await quotas._settle(Charge(who, "b", 900), 900)
        await refused(quotas, who, num_tokens=900)


def test_a_bucket_fills_up_to_its_burst():
    bucket = Bucket(per_s=2.0, burst=10.0, level=0.0, at=0.0)
    assert bucket.wait_s(4, now=0.0) == 2.0
    assert bucket.wait_s(4, now=2.0) == 0.0
    bucket.wait_s(1, now=100.0)
    assert bucket.level == 10.0


@pytest.mark.parametrize("fails_at", ["settling", "renewing"])
async def test_what_redis_may_have_charged_is_owed_until_it_has_been_given_back(
    redis_server, monkeypatch, fails_at
):
    async with router(redis_server) as quotas:
        charge = await quotas.take(tenant(tokens_per_min=1000), "a", 900)
        charge.is_in_doubt = True

        async def fail(**kwargs):
            raise redis.ConnectionError("away")

        settle = quotas._settle_script
        if fails_at == "renewing":
            quotas._owed.append(charge)
        monkeypatch.setattr(quotas, "_settle_script", fail)
        if fails_at == "settling":
            await quotas._settle(charge, 0)
        else:
            with pytest.raises(Unavailable):
                await quotas._renew()
        assert quotas._owed == [charge]
        monkeypatch.setattr(quotas, "_settle_script", settle)
        await quotas._renew()
        assert quotas._owed == []
