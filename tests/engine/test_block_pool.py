"""The block pool: states, reference counts, eviction order, quarantine, events."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool, BlockStats

A, B, C, D, E = (letter * 16 for letter in (b"a", b"b", b"c", b"d", b"e"))


def pool_with_chain(num_blocks: int, *hashes: bytes) -> BlockPool:
    """Blocks 0, 1, … cached under a chain of `hashes` and released tail first."""
    pool = BlockPool(num_blocks, 4)
    add_chain(pool, None, *hashes)
    return pool


def add_chain(pool: BlockPool, parent: bytes | None, *hashes: bytes) -> list[int]:
    block_ids = pool.allocate(len(hashes))
    assert block_ids is not None
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.cache(block_id, block_hash, parent)
        parent = block_hash
    pool.release(reversed(block_ids))
    return block_ids


def test_blocks_are_given_in_order_and_none_means_no_room() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.stats() == BlockStats(total=4, free=1, cached=0, referenced=3, quarantined=0)
    assert pool.allocate(1) == [3]


def test_a_block_is_free_again_after_its_last_reference() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    pool.acquire([0])
    pool.release([0])
    assert pool.num_references(0) == 1 and pool.num_available == 1
    pool.release([0])
    assert pool.stats() == BlockStats(total=2, free=2, cached=0, referenced=0, quarantined=0)


def test_a_released_block_with_a_hash_is_cached_and_can_be_revived() -> None:
    pool = pool_with_chain(4, A, B)
    assert pool.stats() == BlockStats(total=4, free=2, cached=2, referenced=0, quarantined=0)
    pool.acquire(pool.match_prefix([A, B]))
    assert [pool.num_references(block_id) for block_id in (0, 1)] == [1, 1]
    assert pool.num_available == 2


def test_a_match_ends_at_the_first_hash_that_is_not_held() -> None:
    pool = pool_with_chain(8, A, B, C)
    assert pool.match_prefix([A, B, D]) == [0, 1]
    assert pool.match_prefix([D]) == [] and pool.match_prefix([]) == []
    assert pool.match_length([A, B, C, D, E]) == 3


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = pool_with_chain(4, A, B)
    assert pool.allocate(2) == [2, 3]
    assert pool.held_hashes() == [A, B]


def test_eviction_takes_the_tail_of_the_least_recently_released_chain_first() -> None:
    pool = pool_with_chain(4, A, B)
    add_chain(pool, None, C, D)
    assert [pool.allocate(1) for _ in range(4)] == [[1], [0], [3], [2]]


def test_using_a_chain_again_makes_it_the_last_to_be_evicted() -> None:
    pool = pool_with_chain(4, A, B)
    add_chain(pool, None, C, D)
    pool.acquire([0, 1])
    pool.release([1, 0])
    assert pool.allocate(2) == [3, 2]


def test_a_match_alone_does_not_change_the_order_of_eviction() -> None:
    pool = pool_with_chain(2, A)
    add_chain(pool, None, B)
    pool.match_prefix([A])
    assert pool.allocate(1) == [0]


def test_a_parent_outlives_its_children_even_when_it_was_released_first() -> None:
    pool = BlockPool(3, 4)
    pool.allocate(3)
    for block_id, block_hash, parent in ((0, A, None), (1, B, A), (2, C, None)):
        pool.cache(block_id, block_hash, parent)
    pool.release([0, 1, 2])
    assert [pool.allocate(1) for _ in range(3)] == [[1], [0], [2]]


def test_a_shared_prefix_is_evicted_after_both_its_branches() -> None:
    pool = pool_with_chain(4, A, B)
    pool.acquire([0])
    add_chain(pool, A, C)
    pool.release([0])
    assert [pool.allocate(1) for _ in range(4)] == [[3], [1], [2], [0]]


def test_a_cached_block_above_a_referenced_one_still_counts_as_room() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(2)
    pool.cache(0, A, None)
    pool.cache(1, B, A)
    pool.release([0])
    assert pool.num_available == 1
    assert pool.allocate(1) == [0]
    assert pool.held_hashes() == [] and pool.num_references(1) == 1
    assert pool.audit() == []


def test_reserve_takes_the_held_prefix_and_new_blocks_together() -> None:
    pool = pool_with_chain(4, A, B)
    assert pool.reserve(pool.match_prefix([A, B]), 1, spare=1) == [2]
    assert [pool.num_references(block_id) for block_id in range(4)] == [1, 1, 1, 0]


def test_reserve_without_room_changes_nothing() -> None:
    pool = pool_with_chain(4, A, B)
    before = pool.stats()
    assert pool.reserve([0, 1], 2, spare=1) is None
    assert pool.reserve([0, 1], 3) is None
    assert pool.stats() == before


def test_the_second_block_with_a_hash_stays_without_one() -> None:
    pool = pool_with_chain(4, A)
    pool.allocate(1)
    pool.cache(1, A, None)
    pool.release([1])
    assert pool.match_prefix([A]) == [0]
    assert pool.stats().free == 3


def test_a_block_whose_parent_is_gone_is_not_cached() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    pool.cache(0, B, A)
    assert pool.held_hashes() == []


def test_a_quarantined_block_is_given_to_nobody_until_it_settles() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(2)
    pool.quarantine([0, 1])
    assert pool.stats() == BlockStats(total=2, free=0, cached=0, referenced=0, quarantined=2)
    assert pool.allocate(1) is None
    pool.settle([1])
    assert pool.allocate(1) == [1]


def test_dropping_a_hash_drops_its_descendants_and_spares_the_others() -> None:
    pool = pool_with_chain(6, A, B, C)
    add_chain(pool, A, D)
    pool.acquire([2])
    pool.drop(B)
    assert pool.held_hashes() == [A, D]
    assert pool.stats() == BlockStats(total=6, free=3, cached=2, referenced=1, quarantined=0)
    pool.release([2])
    assert pool.stats().free == 4 and pool.audit() == []


def test_dropping_an_unknown_hash_is_harmless() -> None:
    pool = pool_with_chain(2, A)
    pool.drop(E)
    assert pool.held_hashes() == [A]


def test_events_tell_what_was_stored_and_what_was_removed() -> None:
    pool = pool_with_chain(2, A, B)
    assert pool.drain_events() == ([A, B], [])
    pool.allocate(1)
    assert pool.drain_events() == ([], [B])
    assert pool.drain_events() == ([], [])


def test_a_hash_stored_and_removed_between_drains_ends_as_removed() -> None:
    pool = pool_with_chain(2, A)
    pool.drop(A)
    assert pool.drain_events() == ([], [A])


def test_a_hash_removed_and_stored_between_drains_ends_as_stored() -> None:
    pool = pool_with_chain(2, A)
    pool.drain_events()
    pool.drop(A)
    add_chain(pool, None, A)
    assert pool.drain_events() == ([A], [])


def test_held_hashes_come_parents_first_after_a_prefix_is_stored_again() -> None:
    pool = pool_with_chain(6, A, B)
    pool.drop(A)
    add_chain(pool, None, C)
    add_chain(pool, None, A, B)
    assert pool.held_hashes() == [C, A, B]


@pytest.mark.parametrize("block_id", [0, 3])
def test_releasing_what_nobody_holds_asserts(block_id: int) -> None:
    pool = pool_with_chain(4, A)
    with pytest.raises(AssertionError):
        pool.release([block_id])


def test_reviving_a_free_block_asserts() -> None:
    with pytest.raises(AssertionError):
        BlockPool(1, 4).acquire([0])


def test_quarantining_a_shared_or_hashed_block_asserts() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(2)
    pool.acquire([0])
    pool.cache(1, A, None)
    for block_id in (0, 1):
        with pytest.raises(AssertionError):
            pool.quarantine([block_id])


def test_the_audit_names_a_block_in_two_states() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    pool._free.append(0)
    assert pool.audit() == ["the states free, cached, referenced, quarantined do not partition"]


def test_what_was_found_last_is_hottest_and_stands_behind_its_parents() -> None:
    pool = pool_with_chain(8, A, B, C)
    add_chain(pool, A, D)
    add_chain(pool, None, E)
    for chain in ([A, D], [E], [A, B]):
        pool.release(reversed([*pool.match_prefix(chain), *use(pool, chain)]))
    assert pool.hottest(8) == ([A, B, E, D], [-1, 0, -1, 0])
    assert pool.hottest(3) == ([A, B, E], [-1, 0, -1])
    assert pool.audit() == []


def test_what_nobody_asked_for_again_or_is_gone_is_not_hot() -> None:
    pool = pool_with_chain(4, A, B)
    pool.release(reversed([*pool.match_prefix([A, B]), *use(pool, [A, B])]))
    pool.drop(B)
    add_chain(pool, None, C)
    assert pool.hottest(8) == ([A], [-1])


def use(pool: BlockPool, chain: list[bytes]) -> list[int]:
    """Reserves what is held of a chain, and one block more, which is returned."""
    fresh = pool.reserve(pool.match_prefix(chain), 1)
    assert fresh is not None
    return fresh
