"""Every kind of Redis that a URL can name, with real servers."""

import asyncio
import shutil
from contextlib import asynccontextmanager

import pytest

from baton.v1 import types_pb2
from core.errors import StartupError, Unavailable
from core.hashing import block_hashes
from core.prefix_index import PrefixIndexReader
from core.prefix_index_store import IndexStore, Life
from core.redis_client import connect_redis, redacted, redis_errors
from core.registry import Registry
from tests.redis_topologies import behind_tls, cluster, running, sentinel

HASHES = block_hashes(range(400), 4, b"scope")


@asynccontextmanager
async def client_of(url):
    # Patient: these tests are about answers, and a busy machine is no outage.
    client = connect_redis(url, timeout_s=30.0)
    try:
        yield client
    finally:
        await client.aclose()


async def check_all_uses(client):
    """The registry and the index work."""
    registry, store = Registry(client), IndexStore(client)
    await registry.publish(types_pb2.WorkerRecord(worker_id="p0", epoch=1))
    await registry.publish(types_pb2.WorkerRecord(worker_id="p1", epoch=2))
    await registry.remove("p1", 2)
    assert [record.worker_id for record in await registry.list()] == ["p0"]
    life = Life("p0", 1, 1)
    slot = await store.begin(life)
    assert await store.write(slot, life, (0, 1), dict.fromkeys(HASHES[:70], True))
    assert await PrefixIndexReader(client).lookup(HASHES, {"p0": 1, "p1": 1}) == {"p0": 70, "p1": 0}
    assert await store.tend() == []


async def eventually(call):
    """The result of `call` once it does not raise Unavailable any more."""
    async with asyncio.timeout(120):
        while True:
            try:
                with redis_errors():
                    return await call()
            except Unavailable:
                await asyncio.sleep(0.02)


async def test_a_server_that_wants_a_password():
    with running("--requirepass", "se:cr/et") as server:
        async with client_of(f"redis://:se%3Acr%2Fet@{server.address}/3") as client:
            await check_all_uses(client)
        async with client_of(f"redis://:wrong@{server.address}/3") as client:
            with pytest.raises(Unavailable):
                await Registry(client).list()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
async def test_a_server_with_tls_and_a_password(tmp_path):
    with running("--requirepass", "secret") as server:
        async with behind_tls(server, tmp_path) as (address, ca):
            async with client_of(f"rediss://:secret@{address}/0?ssl_ca_certs={ca}") as client:
                await check_all_uses(client)
            async with client_of(f"rediss://:secret@{address}/0") as client:
                with pytest.raises(Unavailable, match="certificate"):
                    await Registry(client).list()


@pytest.mark.parametrize("num_nodes", [1, 3])
async def test_a_cluster(tmp_path, num_nodes):
    with cluster(tmp_path, num_nodes) as nodes:
        async with client_of(f"redis+cluster://{nodes[-1].address}") as client:
            await check_all_uses(client)


async def test_a_cluster_of_which_a_named_node_is_away(tmp_path):
    with cluster(tmp_path, 2) as nodes:
        url = f"redis+cluster://127.0.0.1:1,{nodes[0].address}"
        async with client_of(url) as client:
            await check_all_uses(client)


async def test_a_cluster_that_is_away_is_unavailable():
    async with client_of("redis+cluster://127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await Registry(client).list()


async def test_a_cluster_that_was_away_is_found_again(tmp_path):
    with cluster(tmp_path, 1) as (node,):
        async with client_of(f"redis+cluster://{node.address}") as client:
            await check_all_uses(client)
            node.kill()
            with pytest.raises(Unavailable):
                await Registry(client).list()
            node.start()
            assert await eventually(lambda: Registry(client).list()) == []


async def test_a_sentinel_leads_to_the_primary_and_after_a_failover_to_the_next(tmp_path):
    with (
        running() as primary,
        running("--replicaof", *primary.address.split(":")) as replica,
        sentinel(tmp_path, primary, replica) as watcher,
    ):
        async with client_of(f"redis+sentinel://{watcher.address}/baton/0") as client:
            await check_all_uses(client)
            primary.kill()
            await eventually(lambda: client.set("key", "written to the new primary"))
        async with client_of(replica.url) as client:
            assert await client.get("key") == b"written to the new primary"


async def test_a_sentinel_that_does_not_know_the_service_is_unavailable(tmp_path):
    with running() as primary, sentinel(tmp_path, primary) as watcher:
        async with client_of(f"redis+sentinel://127.0.0.1:1,{watcher.address}/other") as client:
            with pytest.raises(Unavailable, match="other"):
                await Registry(client).list()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("not-a-url", "schemes"),
        ("redis+sentinel://host:26379", "must name the service"),
        ("redis+sentinel://host:26379/service/x", "invalid literal"),
        ("redis+sentinel://host:port/service", "port"),
        ("redis+cluster://host:7000/2", "only database 0"),
        ("redis+cluster://a:1,,b:1", "no host:port"),
        ("redis+ring://host", "schemes"),
        ("redis://host/0?no_such_option=1", "no_such_option"),
        ("redis+sentinel://host/service?no_such_option=1", "no_such_option"),
        ("redis+cluster://host?no_such_option=1", "no_such_option"),
    ],
)
def test_an_url_that_is_not_understood_is_refused_at_start(url, problem):
    with pytest.raises(StartupError, match=problem):
        connect_redis(url)


def test_passwords_are_not_shown():
    url = "redis+sentinel://me:secret@a:1,b:2/name?sentinel_password=secret2&db=1"
    assert redacted(url) == "redis+sentinel://***@a:1,b:2/name?sentinel_password=***&db=1"
    with pytest.raises(StartupError, match="not understood") as caught:
        connect_redis("redos://me:secret@host")
    assert "secret" not in caught.value.message
