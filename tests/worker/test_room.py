"""Who gets blocks on decode."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import TransferError
from core.sampling import SamplingParams
from decode_svc.room import Room
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from kvtransfer.imports import ImportTable, PoolActions


class Bench:
    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=4)
        config = SchedulerConfig(max_model_len=4 * num_blocks)
        self.scheduler = Scheduler(config, self.pool)
        actions = PoolActions(self.pool.release, self.pool.quarantine, self.pool.settle)
        self.imports = ImportTable(120.0, 100, lambda: 0.0, actions)
        self.room = Room(self.pool, self.scheduler, self.imports)

    async def ask(self, name: str, num_tokens: int) -> asyncio.Task[None]:
        sequence = Sequence(name, 1, [1] * num_tokens, SamplingParams(max_tokens=4), b"")
        task = asyncio.ensure_future(self.room.take(sequence))
        await asyncio.sleep(0)
        return task

    def is_granted(self, name: str) -> bool:
        return self.imports.get((name, 1)) is not None


async def test_a_request_as_large_as_the_pool_gets_in_when_it_is_alone() -> None:
    bench = Bench(8)
    await bench.ask("large", 32)
    assert bench.is_granted("large")


async def test_requests_get_room_in_order_when_others_end() -> None:
    bench = Bench(8)
    await bench.ask("a", 20)
    await bench.ask("b", 12)
    await bench.ask("c", 4)
    assert [bench.is_granted(n) for n in "abc"] == [True, False, False]
    bench.imports.abort(("a", 1))
    bench.room.update()
    assert [bench.is_granted(n) for n in "bc"] == [True, True]


async def test_who_withdraws_leaves_no_trace_and_lets_the_next_one_in() -> None:
    bench = Bench(8)
    await bench.ask("a", 20)
    task = await bench.ask("b", 16)
    await bench.ask("c", 4)
    bench.room.withdraw(("b", 1))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.is_granted("c")
    assert bench.room.num_waiting == 0


async def test_asking_twice_gets_one_import() -> None:
    bench = Bench(8)
    await bench.ask("a", 8)
    await bench.ask("a", 8)
    assert bench.pool.stats().referenced == 2


async def test_who_had_its_room_gets_none_again() -> None:
    bench = Bench(8)
    await bench.ask("a", 8)
    bench.imports.abort(("a", 1))
    with pytest.raises(TransferError, match="had its room"):
        await (await bench.ask("a", 8))
    assert bench.pool.stats().referenced == 0
