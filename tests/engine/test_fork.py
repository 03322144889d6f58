"""Blocks of several sequences that go on from one prompt, and the copy of the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.block_pool import BlockPool
from engine.fork import Branch, fork, num_copies
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.builders import (
    BLOCK_SIZE,
    make_scheduler,
    make_sequence,
    pool_of,
    result_of,
    step,
)


def references(pool: BlockPool, num_blocks: int) -> list[int]:
    return [pool.num_references(block_id) for block_id in range(num_blocks)]


def taken(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_full_blocks_are_shared_and_the_partial_one_is_copied() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    table, spare = taken(pool, 3), taken(pool, 2)
    assert fork(pool, table, 10, spare, 3) == [
        Branch([0, 1, 2]),
        Branch([0, 1, 3], copy_source=2),
        Branch([0, 1, 4], copy_source=2),
    ]
    assert references(pool, 6) == [3, 3, 3, 1, 1, 0]


def test_a_prompt_that_ends_at_a_block_border_needs_no_copy() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    assert num_copies(8, 3, BLOCK_SIZE) == 0
    assert fork(pool, taken(pool, 2), 8, [], 2) == [Branch([0, 1]), Branch([0, 1])]
    assert references(pool, 3) == [2, 2, 0]


def test_copies_that_nobody_needs_are_released_and_missing_ones_are_told() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    assert num_copies(7, 4, BLOCK_SIZE) == 3
    fork(pool, taken(pool, 2), 7, taken(pool, 3), 1)
    assert references(pool, 5) == [1, 1, 0, 0, 0]
    assert fork(pool, taken(pool, 1), 3, [], 2)[1] is None


def add_forked(scheduler: Scheduler, prompt: Sequence, num_sequences: int) -> list[Sequence]:
    """Choices of `prompt`, its KV in place, in the scheduler."""
    pool, num_tokens = pool_of(scheduler), prompt.num_tokens
    table = taken(pool, -(-num_tokens // BLOCK_SIZE))
    spare = taken(pool, num_copies(num_tokens, num_sequences, BLOCK_SIZE))
    sequences = []
    for choice, branch in enumerate(fork(pool, table, num_tokens, spare, num_sequences)):
        assert branch is not None
        sequence = replace(
            prompt,
            choice=choice,
            output_token_ids=[100 + choice],
            block_hashes=[],
            block_table=branch.block_table,
            copy_source=branch.copy_source,
            num_computed_tokens=num_tokens,
        )
        scheduler.add_computed(sequence)
        sequences.append(sequence)
    return sequences


def test_the_source_of_a_copy_is_held_until_the_step_that_copies() -> None:
    scheduler = make_scheduler()
    first, second = add_forked(scheduler, make_sequence("a", 6), 2)
    scheduler.abort(first.key)
    assert references(pool_of(scheduler), 3) == [1, 1, 1]
    assert scheduler.audit() == []
    step(scheduler)
    assert second.copy_source is None
    assert references(pool_of(scheduler), 3) == [1, 0, 1]


def test_a_sequence_that_waits_for_a_place_keeps_the_source_of_its_copy() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = add_forked(scheduler, make_sequence("a", 6, max_tokens=3), 2)
    step(scheduler)
    assert (first.copy_source, second.copy_source) == (None, 1)
    step(scheduler)
    assert first.is_finished and references(pool_of(scheduler), 3) == [1, 1, 1]
    step(scheduler)
    assert references(pool_of(scheduler), 3) == [1, 0, 1]


@pytest.mark.parametrize("in_flight", [True, False])
def test_an_aborted_sequence_gives_its_copy_and_the_source_back(in_flight: bool) -> None:
    scheduler = make_scheduler()
    _, second = add_forked(scheduler, make_sequence("a", 6), 2)
    if in_flight:
        batch = scheduler.schedule()
        scheduler.abort(second.key)
        assert references(pool_of(scheduler), 3) == [2, 2, 1]
        scheduler.postprocess(batch, result_of(batch))
    else:
        scheduler.abort(second.key)
    assert references(pool_of(scheduler), 3) == [1, 1, 0]
    assert scheduler.audit() == []


def test_shared_full_blocks_are_cached_once() -> None:
    scheduler = make_scheduler()
    add_forked(scheduler, make_sequence("a", 9), 3)
    stored, removed = pool_of(scheduler).drain_events()
    assert (len(stored), removed) == (2, [])


def test_a_sequence_that_counts_as_preempted_goes_before_new_ones() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    new, lost = make_sequence("new", 4), make_sequence("lost", 4)
    lost.num_preemptions = 1
    scheduler.add(new)
    scheduler.add(lost)
    assert scheduler.num_preempted == 1
    assert [update.sequence for update in step(scheduler)] == [lost]


def test_the_audit_names_a_copy_source_without_a_reference() -> None:
    scheduler = make_scheduler()
    add_forked(scheduler, make_sequence("a", 6), 2)
    pool_of(scheduler).release([1])
    assert scheduler.audit() == ["block 1: belongs to 2 sequences and is referenced 1 times"]


def test_the_audit_names_a_partial_block_that_is_shared_even_by_equal_sequences() -> None:
    scheduler = make_scheduler()
    first, second = add_forked(scheduler, make_sequence("a", 6), 2)
    second.output_token_ids = list(first.output_token_ids)
    pool_of(scheduler).acquire([1])
    second.block_table = list(first.block_table)
    assert scheduler.audit() == ["block 1: shared by sequences of different tokens"]
