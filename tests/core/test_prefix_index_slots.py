"""Who may write into the prefix index, and what is left of those who are gone."""

import random

import pytest

from core import prefix_index_store
from core.hashing import block_hashes
from core.prefix_index import PrefixIndexReader
from core.prefix_index_store import IndexStore, Life

BLOCKS, SLOTS = "baton:{index}:blocks", "baton:{index}:slots"


def hashes(num_blocks, first_token=0):
    return block_hashes(range(first_token, first_token + num_blocks * 4), 4, b"scope")


@pytest.fixture
def store(redis):
    return IndexStore(redis)


@pytest.fixture
def counted(redis):
    """How many blocks of a prompt each of some workers, in their first lives, is said to hold."""
    reader = PrefixIndexReader(redis)

    async def lookup(prompt, *worker_ids):
        return await reader.lookup(prompt, dict.fromkeys(worker_ids, 1))

    return lookup


async def publish(store, worker_id, blocks, epoch=1):
    """Begins a life that holds `blocks`. Returns it and its slot."""
    life = Life(worker_id, epoch, 1)
    slot = await store.begin(life)
    assert await store.write(slot, life, (0, 1), dict.fromkeys(blocks, True))
    return life, slot


async def retire_silent(store, monkeypatch):
    """Ends every lease at once. Returns what is to be scrubbed."""
    with monkeypatch.context() as patch:
        patch.setattr(prefix_index_store, "SLOT_LEASE_S", -1)
        return await store.tend()


async def scrub(store, retired):
    cursor = await store.scrub(b"0", retired)
    while cursor != b"0":
        cursor = await store.scrub(cursor, retired)


@pytest.mark.parametrize("seed", range(5))
async def test_every_worker_is_counted_whatever_the_others_hold(store, counted, seed):
    draw = random.Random(seed)
    prompt = hashes(200)
    lengths = {f"p{i}": draw.choice([0, 1, 7, 7, draw.randint(0, 200), 200]) for i in range(70)}
    for worker_id, length in lengths.items():
        await publish(store, worker_id, prompt[:length])
    assert await counted(prompt, *lengths) == lengths


@pytest.mark.parametrize(
    ("num_held", "found"), [(0, 0), (1, 0), (2, 2), (3, 2), (20, 20), (31, 30), (32, 32), (33, 33)]
)
async def test_of_a_very_long_prompt_only_some_blocks_are_asked_for(
    store, counted, monkeypatch, num_held, found
):
    monkeypatch.setattr(prefix_index_store, "MAX_LOOKUP_KEYS", 17)
    await publish(store, "p0", hashes(33)[:num_held])
    assert await counted(hashes(33), "p0") == {"p0": found}


async def test_slots_that_nobody_asked_about_are_not_looked_for(store):
    for worker_id, length in (("p0", 5), ("p1", 20), ("p2", 9), ("p3", 0)):
        await publish(store, worker_id, hashes(20)[:length])
    version = (await store.slots()).version
    assert await store.lookup(version, [hashes(20)], [3, 2, 0]) == [{2: 9, 0: 5, 3: 0}]
    assert await store.lookup(b"another", [hashes(20)], [0]) is None


async def test_a_slot_is_not_given_away_before_it_is_clean(store, monkeypatch):
    await publish(store, "p0", hashes(9))
    retired = await retire_silent(store, monkeypatch)
    assert await store.begin(Life("p1", 1, 1)) == 1
    await scrub(store, retired)
    assert await store.begin(Life("p2", 1, 1)) == 0


async def test_a_retired_slot_does_not_count_even_before_it_is_clean(store, counted, monkeypatch):
    await publish(store, "dead", hashes(9))
    assert await counted(hashes(9), "dead") == {"dead": 9}
    await retire_silent(store, monkeypatch)
    assert await counted(hashes(9), "dead") == {"dead": 0}


async def test_scrubbing_removes_what_only_the_dead_held(store, counted, monkeypatch, redis):
    await publish(store, "dead", hashes(3000))
    retired = await retire_silent(store, monkeypatch)
    await publish(store, "p0", hashes(100))
    await scrub(store, retired)
    assert await counted(hashes(1000), "dead", "p0") == {"dead": 0, "p0": 100}
    assert await redis.hlen(BLOCKS) == 101  # and the field that names the index


async def test_a_worker_back_from_the_dead_does_not_touch_its_successors_blocks(
    store, counted, monkeypatch
):
    late, slot = await publish(store, "late", hashes(9))
    await scrub(store, await retire_silent(store, monkeypatch))
    _, successors_slot = await publish(store, "p1", hashes(6))
    assert successors_slot == slot
    assert not await store.write(slot, late, (1, 2), dict.fromkeys(hashes(9), False))
    assert not await store.write(slot, late, (1, 2), dict.fromkeys(hashes(9), True))
    assert await counted(hashes(9), "late", "p1") == {"late": 0, "p1": 6}


async def test_a_scrubber_back_from_the_dead_does_not_touch_the_slots_new_owner(
    store, counted, monkeypatch
):
    await publish(store, "dead", hashes(9))
    retired = await retire_silent(store, monkeypatch)
    await scrub(store, retired)
    await publish(store, "p1", hashes(6))
    await scrub(store, retired)
    assert await counted(hashes(6), "p1") == {"p1": 6}
    assert await store.begin(Life("p2", 1, 1)) == 1


async def test_a_reader_notices_that_a_slot_has_changed_hands(store, counted, monkeypatch):
    await publish(store, "dead", hashes(9))
    assert await counted(hashes(9), "dead", "p1") == {"dead": 9, "p1": 0}
    await scrub(store, await retire_silent(store, monkeypatch))
    await publish(store, "p1", hashes(6))
    assert await counted(hashes(9), "dead", "p1") == {"dead": 0, "p1": 6}


async def test_nobody_scrubs_while_somebody_else_does(store, monkeypatch):
    await publish(store, "dead", hashes(9))
    assert await retire_silent(store, monkeypatch) == [b"0", b"dead 1 1 1"]
    assert await store.tend() == []
    monkeypatch.setattr(prefix_index_store, "SCRUB_INTERVAL_S", 0)
    assert await store.tend() == [b"0", b"dead 1 1 1"]


async def test_workers_that_write_keep_their_slots(store):
    await publish(store, "p0", hashes(9))
    assert await store.tend() == []


async def test_a_former_life_gets_no_slot_while_a_later_one_has_one(store, redis):
    await publish(store, "p0", hashes(4), epoch=5)
    assert await store.begin(Life("p0", 4, 9)) is None
    assert await PrefixIndexReader(redis).lookup(hashes(4), {"p0": 5}) == {"p0": 4}


async def test_a_later_life_takes_a_new_slot_and_the_former_one_may_not_write(store):
    life, slot = await publish(store, "p0", hashes(4), epoch=5)
    assert await store.begin(Life("p0", 6, 1)) == 1
    assert not await store.write(slot, life, (1, 2), {})


async def test_a_batch_that_arrives_after_the_next_one_is_not_applied(store, counted):
    life, slot = await publish(store, "p0", hashes(4))
    assert await store.write(slot, life, (1, 3), dict.fromkeys(hashes(4)[2:], False))
    assert not await store.write(slot, life, (1, 2), dict.fromkeys(hashes(4), True))
    assert await counted(hashes(4), "p0") == {"p0": 2}


async def test_a_redis_that_lacks_a_batch_is_noticed(store):
    life, slot = await publish(store, "p0", hashes(4))
    assert not await store.write(slot, life, (2, 3), {})


@pytest.mark.parametrize("key", [BLOCKS, SLOTS])
async def test_when_one_key_is_gone_the_index_begins_anew(store, counted, redis, key):
    life, slot = await publish(store, "p0", hashes(4))
    await publish(store, "p1", hashes(9))
    await redis.delete(key)
    assert not await store.write(slot, life, (1, 2), {})
    await publish(store, "p2", hashes(2))
    assert await counted(hashes(9), "p0", "p1", "p2") == {"p0": 0, "p1": 0, "p2": 2}


async def test_an_index_that_nobody_writes_expires(store, redis):
    life = Life("p0", 1, 1)
    slot = await store.begin(life)
    for key in (BLOCKS, SLOTS):
        assert 0 < await redis.ttl(key) <= 3600
        await redis.persist(key)
    await store.write(slot, life, (0, 1), {})
    for key in (BLOCKS, SLOTS):
        assert 0 < await redis.ttl(key) <= 3600
