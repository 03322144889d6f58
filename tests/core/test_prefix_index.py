import asyncio
from contextlib import asynccontextmanager

import pytest

from core import prefix_index, prefix_index_store
from core.errors import Unavailable
from core.hashing import block_hashes
from core.prefix_index import PrefixIndexReader, PrefixIndexWriter
from core.redis_client import connect_redis


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(prefix_index, "_FLUSH_INTERVAL_S", 0.01)
    monkeypatch.setattr(prefix_index, "_IDLE_CHECK_S", 0.1)
    monkeypatch.setattr(prefix_index, "_RETRY_S", 0.05)


def hashes(num_blocks, first_token=0):
    return block_hashes(range(first_token, first_token + num_blocks * 4), 4, b"scope")


class Cache:
    """A worker's cache: changes its holdings and tells the writer."""

    def __init__(self, redis, worker_id, epoch, held):
        self.held = list(held)
        self.writer = PrefixIndexWriter(redis, worker_id, epoch, lambda: list(self.held))

    def store(self, blocks):
        self.held += blocks
        self.writer.record(blocks, [])

    def drop(self, blocks):
        self.held = [block for block in self.held if block not in blocks]
        self.writer.record([], blocks)


@asynccontextmanager
async def worker(redis, worker_id="p0", epoch=1, held=()):
    """A cache with a running writer."""
    cache = Cache(redis, worker_id, epoch, held)
    task = asyncio.create_task(cache.writer.run())
    try:
        yield cache
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lookup_until(redis, asked, candidates, expected):
    """Looks up again and again until the answer is `expected`."""
    reader = PrefixIndexReader(redis)
    found = None
    for _ in range(3000):
        try:
            found = await reader.lookup(asked, candidates)
        except Unavailable as error:
            found = error
        if found == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"expected {expected}, last answer {found}")


async def test_a_lookup_counts_the_leading_blocks_that_each_worker_holds(redis):
    prompt = hashes(9)
    async with worker(redis, "p0") as p0, worker(redis, "p1") as p1:
        p0.store(prompt[:4])
        p1.store(prompt)
        candidates = {"p0": 1, "p1": 1, "p2": 1}
        await lookup_until(redis, prompt, candidates, {"p0": 4, "p1": 9, "p2": 0})


@pytest.mark.parametrize("num_held", [0, 1, 2, 6, 7])
async def test_bisection_finds_every_length(redis, num_held):
    prompt = hashes(7)
    async with worker(redis, held=prompt[:num_held]):
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": num_held})


async def test_removed_blocks_no_longer_count(redis):
    prompt = hashes(5)
    async with worker(redis, held=prompt) as cache:
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 5})
        cache.drop(prompt[2:])
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 2})


async def test_a_block_that_was_dropped_and_stored_again_counts(redis):
    prompt = hashes(3)
    async with worker(redis) as cache:
        cache.store(prompt)
        cache.drop(prompt[1:])
        cache.store(prompt[1:])
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 3})


async def test_entries_of_an_earlier_life_of_a_worker_do_not_count(redis):
    prompt = hashes(4)
    async with worker(redis, epoch=1, held=prompt):
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 4})
    reader = PrefixIndexReader(redis)
    assert await reader.lookup(prompt, {"p0": 2}) == {"p0": 0}
    async with worker(redis, epoch=2, held=prompt[:1]):
        await lookup_until(redis, prompt, {"p0": 2}, {"p0": 1})


async def test_the_index_fills_again_after_redis_lost_everything(redis):
    prompt = hashes(6)
    async with worker(redis, held=prompt):
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 6})
        await redis.flushall()
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 6})


async def test_events_recorded_while_redis_is_away_arrive_when_it_is_back(redis_server, redis):
    prompt = hashes(6)
    async with worker(redis, held=prompt[:2]) as cache:
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 2})
        redis_server.kill()
        cache.store(prompt[2:])
        await asyncio.sleep(0.1)
        redis_server.start()
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 6})


async def test_an_overflowing_buffer_makes_lost_removals_harmless(redis, monkeypatch):
    prompt = hashes(20)
    async with worker(redis, held=prompt) as cache:
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 20})
        monkeypatch.setattr(prefix_index, "_MAX_BUFFERED_BLOCKS", 4)
        cache.drop(prompt[3:])
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 3})


async def test_holdings_larger_than_a_batch_are_published_whole(redis, monkeypatch):
    monkeypatch.setattr(prefix_index, "_BATCH_BLOCKS", 8)
    prompt = hashes(50)
    async with worker(redis, held=prompt[:30]) as cache:
        cache.store(prompt[30:])
        await lookup_until(redis, prompt, {"p0": 1}, {"p0": 50})


async def test_workers_remove_what_silent_ones_have_left(redis, monkeypatch):
    monkeypatch.setattr(prefix_index, "_TEND_INTERVAL_S", 0.05)
    monkeypatch.setattr(prefix_index_store, "SCRUB_INTERVAL_S", 0)
    async with worker(redis, "silent", held=hashes(9)):
        await lookup_until(redis, hashes(9), {"silent": 1}, {"silent": 9})
    async with worker(redis, "p0", held=hashes(3)):
        await lookup_until(redis, hashes(9), {"silent": 1, "p0": 1}, {"silent": 9, "p0": 3})
        monkeypatch.setattr(prefix_index_store, "SLOT_LEASE_S", 1)
        async with asyncio.timeout(60):
            while await redis.hlen("baton:{index}:blocks") > 4:
                await asyncio.sleep(0.05)
        await lookup_until(redis, hashes(9), {"silent": 1, "p0": 1}, {"silent": 0, "p0": 3})


async def test_a_former_life_that_still_runs_waits_until_the_later_one_is_gone(redis, caplog):
    async with worker(redis, epoch=2, held=hashes(3)):
        await lookup_until(redis, hashes(9), {"p0": 2}, {"p0": 3})
        async with worker(redis, epoch=1, held=hashes(9)):
            while "a later life of p0" not in caplog.text:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert await PrefixIndexReader(redis).lookup(hashes(9), {"p0": 1}) == {"p0": 0}
    await lookup_until(redis, hashes(9), {"p0": 2}, {"p0": 3})


async def test_without_hashes_or_candidates_nobody_is_asked():
    reader = PrefixIndexReader(connect_redis("redis://127.0.0.1:1/0"))
    assert await reader.lookup([], {"p0": 1}) == {"p0": 0}
    assert await reader.lookup(hashes(2), {}) == {}


async def test_a_lookup_without_redis_is_unavailable():
    with pytest.raises(Unavailable):
        await PrefixIndexReader(connect_redis("redis://127.0.0.1:1/0")).lookup(hashes(1), {"p0": 1})
