"""A worker that starts takes over the prefixes that are in use on another one of its role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.v1 import types_pb2
from core.errors import TransferError, Unavailable
from tests.engine.harness import make_prompt
from tests.worker.pace import let_time_pass
from tests.worker.pair import Pair, Worker, flip_a_byte_at, pair
from tests.worker.prefixes import PATIENCE_S, Fetches, stick
from tests.worker.reads import until
from worker.prefix_reader import PrefixReader
from worker.prefix_warmer import PrefixWarmer, chains, sources

A, B, C, D, E = (bytes([letter]) * 16 for letter in b"abcde")
READY, STARTING = types_pb2.WORKER_STATE_READY, types_pb2.WORKER_STATE_STARTING
HOT = make_prompt(64)
"""Four blocks, of which the last is computed again by whoever asks for it."""


def record(worker_id: str, num_cached: int = 0, **fields: object) -> types_pb2.WorkerRecord:
    load = types_pb2.Load(blocks=types_pb2.BlockStats(cached=num_cached))
    defaults: dict[str, object] = {"role": types_pb2.ROLE_PREFILL, "state": READY}
    return types_pb2.WorkerRecord(worker_id=worker_id, load=load, **{**defaults, **fields})  # type: ignore[arg-type]


def test_ready_workers_of_the_role_that_fit_are_asked_and_who_holds_most_is_first() -> None:
    own = record("p0")
    other_model = types_pb2.Fingerprint(model="other")
    records = [
        own,
        record("p1", 5),
        record("p2", 7),
        record("p3", 9, state=STARTING),
        record("d0", 9, role=types_pb2.ROLE_DECODE),
        record("p4", 9, fingerprint=other_model),
    ]
    assert [found.worker_id for found in sources(records, own)] == ["p2", "p1"]


def test_chains_lead_from_first_blocks_to_last_ones() -> None:
    assert chains([A, B, C, D, E], [-1, 0, -1, 0, 1]) == [[C], [A, D], [A, B, E]]
    assert chains([], []) == []


@pytest.mark.parametrize("parents", [[-1], [0, -1], [-1, 1], [-2, 0]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(TransferError):
        chains([A, B], parents)


@pytest.fixture(autouse=True)
def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fetch is given up because the machine is slow."""
    monkeypatch.setattr("worker.prefix_warmer.MAX_FETCH_S", PATIENCE_S)
    monkeypatch.setattr("worker.prefix_reader.MAX_FETCH_S", PATIENCE_S)


@dataclass
class Newcomer:
    """A worker that knows of others, and nothing else yet."""

    both: Pair
    worker: Worker
    records: list[types_pb2.WorkerRecord]

    async def list_workers(self) -> list[types_pb2.WorkerRecord]:
        return self.records

    async def warm(self, max_blocks: int = 64, timeout_s: float = 30.0) -> int:
        """It takes prefixes over; how many blocks."""
        host = self.worker.host
        reader = PrefixReader(host, host.service.on_room)
        await PrefixWarmer(host, reader, self.list_workers).run(max_blocks, timeout_s)
        assert self.worker.audit() == []
        return host.engine.pool.stats().cached


@asynccontextmanager
async def newcomer(
    folder: Path, transport: str = "tcp", num_repeats: int = 2, **settings: object
) -> AsyncIterator[tuple[Newcomer, Pair]]:
    """Beside a pair that has served HOT some times, and another prompt once."""
    async with (
        pair(folder, transport) as one,
        pair(folder, transport, prefill=settings, number=1) as two,
    ):
        for number in range(num_repeats):
            await one.generate(HOT, f"hot {number}")
        await one.generate(make_prompt(64, seed=1), "once")
        await one.until_idle()
        yield Newcomer(two, two.prefill, [one.prefill.host.record()]), one


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_a_prompt_that_was_asked_again_need_not_be_computed(
    folder: Path, expected, transport: str
) -> None:
    async with newcomer(folder, transport) as (new, one):
        assert await new.warm() == 3
        result = await new.both.generate(HOT, "here")
        assert (result.output, result.cached_tokens) == (expected(HOT), 48)
        await one.until_idle()


async def test_decode_need_not_read_what_it_took_over(folder: Path, expected) -> None:
    async with newcomer(folder) as (new, one):
        of_decode = Newcomer(new.both, new.both.decode, [one.decode.host.record()])
        assert await of_decode.warm() == 4
        result = await new.both.generate(HOT, "here")
        assert (result.output, result.transferred_blocks) == (expected(HOT), 0)


async def test_what_was_asked_once_is_left_where_it_is(folder: Path) -> None:
    async with newcomer(folder, num_repeats=1) as (new, _):
        assert await new.warm() == 0


async def test_no_more_is_taken_than_was_asked_for(folder: Path) -> None:
    async with newcomer(folder) as (new, _):
        assert await new.warm(max_blocks=2) == 2


async def test_a_long_prefix_comes_piece_by_piece(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with newcomer(folder) as (new, _):
        block_bytes = new.worker.host.engine.kv_cache.block_bytes
        monkeypatch.setattr("worker.prefix_warmer.FETCH_BYTES", 2 * block_bytes)
        assert (await new.warm(), fetches.num_wanted) == (3, [2, 1])


async def test_what_was_taken_over_is_published(folder: Path) -> None:
    async with newcomer(folder) as (new, one):
        hot, _ = one.prefill.host.engine.pool.hottest(64)
        published = new.worker.host._index._is_stored
        await new.warm()
        await until(lambda: len(published) == 3)
        assert published == dict.fromkeys(hot, True)


async def test_a_damaged_block_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with newcomer(folder) as (new, one):
        flip_a_byte_at(new.worker, monkeypatch, index=1)
        assert await new.warm() == 0
        await one.until_idle()


async def test_another_worker_is_asked_when_the_first_is_gone(folder: Path) -> None:
    async with pair(folder, number=2) as gone:
        await gone.generate(make_prompt(200), "many blocks")
        await gone.until_idle()
        last_words = gone.prefill.host.record()
    async with newcomer(folder) as (new, one):
        new.records = [last_words, one.prefill.host.record()]
        assert await new.warm() == 3


async def test_nobody_to_ask_is_no_reason_to_wait(folder: Path) -> None:
    async def no_redis() -> list[types_pb2.WorkerRecord]:
        raise Unavailable("Redis is away")

    async with newcomer(folder) as (new, _):
        new.records = []
        assert await new.warm() == 0
        new.list_workers = no_redis  # type: ignore[method-assign]
        assert await new.warm() == 0


async def test_a_read_that_never_ends_costs_the_time_that_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with newcomer(folder) as (new, one):
        stuck = stick(new.both, monkeypatch)
        warming = asyncio.ensure_future(new.warm(timeout_s=10.0))
        await asyncio.wait_for(stuck.has_begun.wait(), 30)
        let_time_pass(monkeypatch, 10.0)
        assert await asyncio.wait_for(warming, 30) == 0
        pool = new.worker.host.engine.pool
        assert pool.stats().quarantined == 3
        await one.until_idle()
        stuck.may_settle.set()
        await until(lambda: pool.stats().free == 64)
