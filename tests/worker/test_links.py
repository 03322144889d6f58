"""A worker that was asked for a fast link takes no requests while it has only slower ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from baton.v1 import types_pb2, worker_pb2
from core.errors import TransferError, Unavailable
from core.http_server import HttpServer
from core.registry import Registry
from kvtransfer.routes import LinkKind, UcxLog
from tests.worker.pace import let_time_pass
from tests.worker.pair import Pair, pair
from tests.worker.reads import StuckPull, until
from worker.links import PROBE_TIMEOUT_S, LinkProbe, LinkVerdict, LinkWatch
from worker.metrics import metrics_app

SHARED_MEMORY = LinkKind.SHARED_MEMORY
READY, STARTING = types_pb2.WORKER_STATE_READY, types_pb2.WORKER_STATE_STARTING


@dataclass
class Network:
    """Stands in for a transport and the log of its library: peers by name, with their route."""

    routes_to: dict[str, str]
    found: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    failures: int = 0
    name: str = "nixl"
    changes: list[str] = field(default_factory=list)

    @property
    def transport(self) -> Network:
        return self

    async def read_from(self, address: worker_pb2.WorkerAddress) -> None:
        self.reads.append(address.worker_id)
        if self.failures:
            self.failures -= 1
            raise TransferError("away")
        self.found.append(self.routes_to[address.worker_id])

    def routes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.found))

    async def list(self) -> list[types_pb2.WorkerRecord]:
        own = record("D0", types_pb2.ROLE_DECODE)
        return [own, *(record(name, types_pb2.ROLE_PREFILL) for name in self.routes_to)]

    def watch(self, require: str | None) -> LinkWatch:
        async def on_change() -> None:
            self.changes.append(watch.verdict.reason)

        watch = LinkWatch(require, cast(LinkProbe, self), cast(UcxLog, self), on_change)
        return watch

    async def look(self, watch: LinkWatch) -> str:
        own = record("D0", types_pb2.ROLE_DECODE)
        await watch.look(cast(Registry, self), own)
        return watch.verdict.reason


def record(worker_id: str, role: types_pb2.Role.ValueType) -> types_pb2.WorkerRecord:
    return types_pb2.WorkerRecord(worker_id=worker_id, role=role, epoch=1)


@pytest.mark.parametrize(
    ("verdict", "is_kept"),
    [
        (LinkVerdict(), False),
        (LinkVerdict(SHARED_MEMORY), True),
        (LinkVerdict(SHARED_MEMORY, (), True), False),
        (LinkVerdict(SHARED_MEMORY, ("tcp/eth0",), True), True),
        (LinkVerdict(SHARED_MEMORY, ("tcp/eth0", "cma/memory"), True), False),
        (LinkVerdict(LinkKind.RDMA, ("cma/memory",), True), False),
        (LinkVerdict(LinkKind.CUDA_IPC, ("cma/memory",), True), True),
    ],
)
def test_only_slower_links_keep_a_worker_from_ready(verdict: LinkVerdict, is_kept: bool) -> None:
    assert bool(verdict.reason) is is_kept


async def test_a_worker_reads_from_its_peers_until_one_is_fast_enough() -> None:
    network = Network({"P0": "tcp/eth0", "P1": "cma/memory", "P2": "cma/memory"})
    watch = network.watch("shared-memory")
    assert await network.look(watch) == ""
    await network.look(watch)
    assert network.reads == ["P0", "P1"]


async def test_a_slow_peer_is_named_and_read_from_once() -> None:
    network = Network({"P0": "tcp/eth0"})
    watch = network.watch("rdma")
    for _ in range(2):
        reason = await network.look(watch)
        assert reason == "its KV moves over tcp/eth0, slower than --kv-require rdma"
    assert network.reads == ["P0"]
    assert network.changes == [reason]


async def test_a_faster_peer_that_comes_later_makes_it_ready() -> None:
    network = Network({"P0": "tcp/eth0"})
    watch = network.watch("rdma")
    await network.look(watch)
    network.routes_to["P1"] = "rc_mlx5/mlx5_0:1"
    assert await network.look(watch) == ""
    assert network.changes[-1] == ""


async def test_a_peer_that_could_not_be_read_from_is_tried_again() -> None:
    network = Network({"P0": "cma/memory"}, failures=1)
    watch = network.watch("shared-memory")
    await network.look(watch)
    await network.look(watch)
    assert network.reads == ["P0", "P0"]


async def test_without_a_demand_links_are_reported_and_not_read_for_that() -> None:
    network = Network({"P0": "tcp/eth0"}, found=["cma/memory"])
    watch = network.watch("any")
    assert await network.look(watch) == ""
    assert (watch.verdict.routes, network.reads) == (("cma/memory",), [])


async def fetch(both: Pair, path: str) -> tuple[int, str]:
    server = HttpServer(metrics_app(both.decode.host.figures), "127.0.0.1", 0)
    address = await server.start()
    async with httpx2.AsyncClient() as http:
        answer = await http.get(f"http://{address}{path}")
    await server.stop()
    return answer.status_code, answer.text


async def test_sockets_are_never_faster_than_tcp(folder: Path) -> None:
    async with pair(folder, decode={"kv_require": "rdma"}) as both:
        host = both.decode.host
        await until(lambda: host.links.verdict.has_looked)
        assert host.state == host.record().state == STARTING
        with pytest.raises(Unavailable, match="tcp/sockets, slower than --kv-require rdma"):
            host.require_ready()
        assert (await fetch(both, "/health"))[0] == 503
        text = (await fetch(both, "/metrics"))[1]
        assert 'baton_kv_transport_info{link="tcp",route="tcp/sockets"} 1.0' in text


async def test_a_probe_gives_its_block_back(folder: Path) -> None:
    async with pair(folder) as both:
        host = both.decode.host
        room: list[Any] = []
        pool = host.engine.pool
        probe = LinkProbe(host.transport, host.peers, pool, host.tasks, lambda: room.append(1))
        await probe.read_from(both.prefill.address)
        assert (pool.stats().free, room) == (64, [1])


async def test_a_probe_that_is_given_up_quarantines_its_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        host = both.decode.host
        pool = host.engine.pool
        stuck = StuckPull()
        monkeypatch.setattr(host.transport, "pull", lambda *_: stuck)
        probe = LinkProbe(host.transport, host.peers, pool, host.tasks, lambda: None)
        probing = asyncio.ensure_future(probe.read_from(both.prefill.address))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        let_time_pass(monkeypatch, PROBE_TIMEOUT_S)
        await until(probing.done)
        with pytest.raises(TimeoutError):
            await probing
        assert (pool.stats().free, pool.stats().quarantined) == (63, 1)
        stuck.may_settle.set()
        await until(lambda: pool.stats().free == 64)
