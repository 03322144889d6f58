"""The scheduler's life of a sequence: admission, caching, finish, abort, imports."""

from __future__ import annotations

import pytest

from core.errors import StartupError
from core.hashing import block_hashes
from engine.block_pool import BlockPool, BlockStats
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import FinishReason, SequenceStatus
from tests.engine.builders import (
    BLOCK_SIZE,
    EOS,
    SCOPE,
    chunks,
    make_scheduler,
    make_sequence,
    next_chunks,
    pool_of,
    result_of,
    step,
)


def test_a_prompt_is_computed_and_then_decoded_token_by_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 6))
    assert next_chunks(scheduler) == [("a", 0, 6)]
    assert next_chunks(scheduler) == [("a", 6, 1)]
    assert next_chunks(scheduler) == [("a", 7, 1)]


def test_admission_allocates_blocks_for_every_known_token_at_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    sequence = make_sequence("a", 100, outputs=[5] * 10)
    scheduler.add(sequence)
    assert chunks(scheduler.schedule()) == [("a", 0, 64)]
    assert sequence.block_table == list(range(28))


def test_a_chunk_inside_the_prompt_yields_an_update_without_a_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    sequence = make_sequence("a", 100)
    scheduler.add(sequence)
    (update,) = step(scheduler)
    assert update.token is None and update.finish_reason is None
    assert sequence.num_computed_tokens == 64 and sequence.output_token_ids == []
    (update,) = step(scheduler)
    assert update.token is not None and update.output_index == 0
    assert sequence.output_token_ids == [7]


def test_a_retried_sequence_continues_after_its_prior_outputs() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6, outputs=[1, 2, 3], max_tokens=5)
    scheduler.add(sequence)
    assert [step(scheduler)[0].output_index for _ in range(2)] == [3, 4]
    assert sequence.finish_reason is FinishReason.LENGTH


def test_nothing_to_do_schedules_nothing() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None and not scheduler.has_work


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", list(range(10)), max_tokens=1))
    step(scheduler)
    sequence = make_sequence("b", [*range(8), 50, 51, 52])
    scheduler.add(sequence)
    assert next_chunks(scheduler) == [("b", 8, 3)]
    assert sequence.block_table[:2] == [0, 1] and sequence.num_cached_tokens == 8


def test_a_fully_cached_prompt_recomputes_its_last_block_into_a_new_one() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", list(range(8)), max_tokens=1))
    step(scheduler)
    sequence = make_sequence("b", list(range(8)))
    scheduler.add(sequence)
    assert chunks(scheduler.schedule()) == [("b", 4, 4)]
    assert sequence.block_table == [0, 2]
    assert scheduler.audit() == []


def test_a_block_is_findable_only_after_its_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(make_sequence("a", list(range(16))))
    scheduler.add(make_sequence("b", list(range(16))))
    assert chunks(scheduler.schedule()) == [("a", 0, 16), ("b", 0, 16)]
    assert pool_of(scheduler).held_hashes() == []


def test_blocks_that_decoding_fills_are_cached_under_the_chain_of_hashes() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [1, 2, 3]))
    for _ in range(6):
        step(scheduler, token_id=9)
    expected = block_hashes([1, 2, 3, 9, 9, 9, 9, 9], BLOCK_SIZE, SCOPE)
    assert pool_of(scheduler).held_hashes() == expected


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        scheduler.add(make_sequence(request_id, list(range(10)), max_tokens=1))
        assert next_chunks(scheduler) == [(request_id, 0, 10)]
    assert pool_of(scheduler).stats().free == 100


@pytest.mark.parametrize(
    ("token_id", "limits", "reason"),
    [
        (EOS, {}, FinishReason.STOP),
        (5, {"stop_token_ids": (5,)}, FinishReason.STOP),
        (EOS, {"min_tokens": 1}, FinishReason.STOP),
        (EOS, {"min_tokens": 2}, None),
        (EOS, {"min_tokens": 2, "max_tokens": 1}, FinishReason.LENGTH),
        (EOS, {"max_tokens": 1}, FinishReason.STOP),
        (7, {"max_tokens": 1}, FinishReason.LENGTH),
        (7, {"max_tokens": 2}, None),
    ],
)
def test_a_token_ends_a_sequence(
    token_id: int, limits: dict[str, int], reason: FinishReason | None
) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6, **limits)  # type: ignore[arg-type]
    scheduler.add(sequence)
    (update,) = step(scheduler, token_id)
    assert update.finish_reason is sequence.finish_reason is reason
    assert sequence.output_token_ids == [token_id]


def test_the_context_length_ends_a_sequence() -> None:
    scheduler = make_scheduler(max_model_len=8)
    sequence = make_sequence("a", 6)
    scheduler.add(sequence)
    assert [step(scheduler)[0].finish_reason for _ in range(2)] == [None, FinishReason.LENGTH]
    assert sequence.num_tokens == 8


def test_a_finished_sequence_gives_its_blocks_back() -> None:
    scheduler = make_scheduler(num_blocks=4)
    sequence = make_sequence("a", 6, max_tokens=1)
    scheduler.add(sequence)
    step(scheduler)
    assert sequence.status is SequenceStatus.FINISHED and sequence.block_table == []
    assert pool_of(scheduler).stats() == BlockStats(4, 3, 1, 0, 0)
    assert not scheduler.has_work


def test_aborting_a_waiting_or_running_sequence_frees_it_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_sequence("a", 6), make_sequence("b", 6)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    assert scheduler.abort(waiting.key) is waiting
    assert scheduler.abort(running.key) is running
    assert pool_of(scheduler).stats().referenced == 0 and not scheduler.has_work
    assert scheduler.abort(running.key) is None


def test_a_sequence_aborted_in_a_step_keeps_its_blocks_until_the_step_is_over() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.abort(sequence.key) is sequence and sequence.is_finished
    assert scheduler.abort(sequence.key) is None and not scheduler.has_work
    assert pool_of(scheduler).stats().referenced == 2 and scheduler.audit() == []
    assert scheduler.postprocess(batch, result_of(batch)) == []
    assert pool_of(scheduler).stats().referenced == 0 and sequence.output_token_ids == []


def test_blocks_with_an_own_reference_outlive_the_sequence() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6, max_tokens=1)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    exported = list(sequence.block_table)
    pool_of(scheduler).acquire(exported)
    scheduler.postprocess(batch, result_of(batch))
    assert [pool_of(scheduler).num_references(b) for b in exported] == [1, 1]


def test_an_import_is_cached_at_once_and_decodes_in_the_next_step() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 9, outputs=[3])
    sequence.num_computed_tokens = 9
    sequence.block_table = pool_of(scheduler).allocate(3) or []
    scheduler.add_computed(sequence)
    assert len(pool_of(scheduler).held_hashes()) == 2 and scheduler.num_running == 1
    assert next_chunks(scheduler) == [("a", 9, 1)]
    assert sequence.num_cached_tokens == 0


def test_an_import_without_a_place_waits_with_its_blocks_and_goes_before_waiting_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("a", 6, max_tokens=2))
    step(scheduler)
    scheduler.add(make_sequence("b", 6))
    imported = make_sequence("c", 9, outputs=[3])
    imported.num_computed_tokens = 9
    imported.block_table = pool_of(scheduler).allocate(3) or []
    scheduler.add_computed(imported)
    assert scheduler.num_waiting == 2 and scheduler.num_running == 1
    assert next_chunks(scheduler) == [("a", 6, 1)]
    assert next_chunks(scheduler) == [("c", 9, 1)]
    assert scheduler.audit() == []


def test_aborting_an_import_that_waits_frees_its_blocks() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence("a", 6))
    step(scheduler)
    imported = make_sequence("c", 9, outputs=[3])
    imported.num_computed_tokens = 9
    imported.block_table = pool_of(scheduler).allocate(3) or []
    scheduler.add_computed(imported)
    scheduler.abort(imported.key)
    assert pool_of(scheduler).stats().referenced == 2 and scheduler.num_waiting == 0


def test_queued_tokens_are_those_that_wait_for_prefill() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=64)
    scheduler.add(make_sequence("a", 6))
    step(scheduler)
    scheduler.add(make_sequence("b", 100))
    scheduler.add(make_sequence("c", 20))
    assert scheduler.num_queued_tokens == 120
    step(scheduler)
    assert scheduler.num_queued_tokens == 120 - 63


def test_two_steps_at_a_time_assert() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 6))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="on the device"):
        scheduler.schedule()


def test_the_same_key_twice_asserts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 6))
    with pytest.raises(AssertionError, match="known already"):
        scheduler.add(make_sequence("a", 6))


def test_a_pool_too_small_for_one_sequence_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"max_model_len 17 needs 5 KV blocks .* has 4"):
        Scheduler(SchedulerConfig(max_model_len=17), BlockPool(4, BLOCK_SIZE))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 63}, r"at least max_num_seqs \(64\)"),
        ({"max_long_partial_prefills": 3}, r"at most max_num_partial_prefills \(2\)"),
    ],
)
def test_limits_that_contradict_are_a_startup_error(limits: dict[str, int], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        SchedulerConfig(max_model_len=100, **limits)  # type: ignore[arg-type]


def test_the_audit_names_a_block_that_two_sequences_hold_for_different_tokens() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence("a", 6), make_sequence("b", 6)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    pool_of(scheduler).acquire([first.block_table[0]])
    second.block_table.append(first.block_table[0])
    assert scheduler.audit() == ["block 0: shared by sequences of different tokens"]


def test_the_audit_names_a_block_with_too_few_references() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6)
    scheduler.add(sequence)
    step(scheduler)
    pool_of(scheduler).release([1])
    assert scheduler.audit() == ["block 1: belongs to 1 sequences and is referenced 0 times"]
