"""A worker that starts is ready once it gets through to one of those that it needs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from kvtransfer.peers import Peer
from tests.worker.pair import Pair, pair
from worker.reach import reach_peers

AWAY = "127.0.0.1:1"
"""Where nobody listens."""


def away(both: Pair, **fields: object) -> types_pb2.WorkerRecord:
    """A decode worker that fits and does not answer."""
    record = both.decode.host.record()
    record.worker_id, record.address = "away", AWAY
    record.MergeFrom(types_pb2.WorkerRecord(**fields))  # type: ignore[arg-type]
    return record


class Workers:
    """The registry: each look finds the next list, the last one again and again."""

    def __init__(self, *lists: list[types_pb2.WorkerRecord]) -> None:
        self._lists = list(lists)
        self.num_looks = 0

    async def list(self) -> list[types_pb2.WorkerRecord]:
        self.num_looks += 1
        return self._lists[min(self.num_looks, len(self._lists)) - 1]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.reach.RETRY_S", 0.01)


async def test_one_that_answers_is_enough(folder: Path) -> None:
    async with pair(folder, "tcp") as both:
        workers = Workers([away(both), both.decode.host.record()])
        await asyncio.wait_for(reach_peers(both.prefill.host, workers.list), 30)
        assert workers.num_looks == 1


async def test_one_that_never_answers_holds_up_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder, "tcp") as both:
        peers = both.prefill.host.peers
        real_connected = peers.connected

        async def connected(address: worker_pb2.WorkerAddress) -> Peer:
            if address.worker_id == "away":
                await asyncio.Event().wait()
            return await real_connected(address)

        monkeypatch.setattr(peers, "connected", connected)
        workers = Workers([away(both), both.decode.host.record()])
        await asyncio.wait_for(reach_peers(both.prefill.host, workers.list), 30)


async def test_it_waits_for_an_answer_and_says_once_what_is_wrong(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(folder, "tcp") as both:
        alone = [away(both)]
        workers = Workers(alone, alone, alone, [both.decode.host.record()])
        await asyncio.wait_for(reach_peers(both.prefill.host, workers.list), 30)
        assert workers.num_looks == 4
    assert caplog.text.count("peer_unreachable") == 1
    assert AWAY in caplog.text


async def test_peers_that_leave_the_registry_are_not_waited_for(folder: Path) -> None:
    async with pair(folder, "tcp") as both:
        workers = Workers([away(both)], [])
        await asyncio.wait_for(reach_peers(both.prefill.host, workers.list), 30)
        assert workers.num_looks == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"role": types_pb2.ROLE_PREFILL},
        {"fingerprint": types_pb2.Fingerprint(model="another")},
        {"state": types_pb2.WORKER_STATE_DRAINING},
    ],
)
async def test_those_that_share_no_request_with_it_are_left_alone(
    folder: Path, fields: dict[str, object]
) -> None:
    async with pair(folder, "tcp") as both:
        workers = Workers([away(both, **fields)])
        await asyncio.wait_for(reach_peers(both.prefill.host, workers.list), 30)
        assert workers.num_looks == 1


async def test_without_redis_it_does_not_wait(folder: Path) -> None:
    async def list_workers() -> list[types_pb2.WorkerRecord]:
        raise Unavailable("Redis is away")

    async with pair(folder, "tcp") as both:
        await asyncio.wait_for(reach_peers(both.prefill.host, list_workers), 30)
