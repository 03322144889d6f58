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

    async def ask(self, name: str, num_tokens: int, num_choices: int = 1) -> asyncio.Task[None]:
        sequence = Sequence(name, 1, [1] * num_tokens, SamplingParams(max_tokens=4), b"")
        task = asyncio.ensure_future(self.room.take(sequence, num_choices))
        await asyncio.sleep(0)
        return task

    def granted(self, name: str) -> tuple[list[int], list[int]]:
        """Blocks of the prompt, and those for copies."""
        entry = self.imports.get((name, 1))
        assert entry is not None
        return entry.block_table, entry.spare

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


async def test_a_place_in_the_line_lasts_until_the_last_of_those_who_ask_has_left() -> None:
    bench = Bench(8)
    await bench.ask("a", 20)
    askers = [await bench.ask("b", 16), await bench.ask("b", 16)]
    await bench.ask("c", 4)
    for asker, num_waiting in zip(askers, (2, 0), strict=True):
        asker.cancel()
        await asyncio.wait({asker})
        assert bench.room.num_waiting == num_waiting
    assert [bench.is_granted(n) for n in "bc"] == [False, True]


async def test_who_has_left_may_ask_again_behind_the_others() -> None:
    bench = Bench(8)
    await bench.ask("a", 20)
    (await bench.ask("b", 12)).cancel()
    await bench.ask("c", 20)
    await bench.ask("b", 12)
    bench.imports.abort(("a", 1))
    bench.room.update()
    assert [bench.is_granted(n) for n in "cb"] == [True, False]


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


async def test_choices_get_a_block_each_for_their_copy_of_the_partial_one() -> None:
    bench = Bench(8)
    await bench.ask("partial", 6, num_choices=3)
    assert bench.granted("partial") == ([0, 1], [2, 3])
    bench.imports.abort(("partial", 1))
    await bench.ask("full", 8, num_choices=3)
    assert [len(blocks) for blocks in bench.granted("full")] == [2, 0]


async def test_each_choice_needs_room_to_grow_unless_the_request_is_alone() -> None:
    bench = Bench(8)
    await bench.ask("first", 6, num_choices=3)
    await bench.ask("second", 4, num_choices=4)
    await bench.ask("third", 4, num_choices=2)
    assert [bench.is_granted(n) for n in ("second", "third")] == [False, False]
    bench.imports.abort(("first", 1))
    bench.room.update()
    assert [bench.is_granted(n) for n in ("second", "third")] == [True, True]


async def test_a_request_gets_as_many_copies_as_the_whole_pool_has() -> None:
    bench = Bench(8)
    await bench.ask("large", 23, num_choices=9)
    assert bench.granted("large") == ([0, 1, 2, 3, 4, 5], [6, 7])
