"""Who gets the step's tokens and the pool's room: order, sharing, preemption."""

from __future__ import annotations

from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from tests.engine.builders import (
    make_scheduler,
    make_sequence,
    next_chunks,
    pool_of,
    step,
)


def add_all(scheduler: Scheduler, **prompts: int) -> dict[str, Sequence]:
    """Adds one sequence for each keyword, of that many prompt tokens."""
    sequences = {name: make_sequence(name, length) for name, length in prompts.items()}
    for sequence in sequences.values():
        scheduler.add(sequence)
    return sequences


def test_decodes_come_first_then_begun_prefills_then_admissions() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_partial_prefills=3)
    add_all(scheduler, decode=6)
    step(scheduler)
    add_all(scheduler, begun=80)
    assert next_chunks(scheduler) == [("decode", 6, 1), ("begun", 0, 63)]
    add_all(scheduler, fresh=20)
    assert next_chunks(scheduler) == [("decode", 7, 1), ("begun", 63, 17), ("fresh", 0, 20)]


def test_sequences_are_admitted_in_order_of_arrival_up_to_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add_all(scheduler, a=6, b=6, c=6)
    assert next_chunks(scheduler) == [("a", 0, 6), ("b", 0, 6)]
    assert scheduler.num_running == 2 and scheduler.num_waiting == 1


def test_a_sequence_without_room_holds_up_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add_all(scheduler, a=14, b=14, c=2)
    assert next_chunks(scheduler) == [("a", 0, 14)]
    assert scheduler.num_waiting == 2


def test_any_number_of_prompts_that_fit_the_budget_are_prefilled_in_one_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add_all(scheduler, a=20, b=20, c=20, d=20)
    assert next_chunks(scheduler) == [("a", 0, 20), ("b", 0, 20), ("c", 0, 20), ("d", 0, 4)]


def test_a_long_prompt_alone_takes_the_whole_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=32)
    add_all(scheduler, long=150)
    assert next_chunks(scheduler) == [("long", 0, 64)]


def test_a_short_prompt_passes_through_beside_a_long_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=32)
    add_all(scheduler, long=150)
    step(scheduler)
    add_all(scheduler, short=10, other=30)
    assert next_chunks(scheduler) == [("short", 0, 10), ("other", 0, 22), ("long", 64, 32)]


def test_a_second_long_prompt_waits_and_shorter_ones_pass_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=32)
    add_all(scheduler, first=70, second=100, short=10)
    assert next_chunks(scheduler) == [("short", 0, 10), ("first", 0, 54)]
    # What is left of the first is short now.
    assert next_chunks(scheduler) == [("short", 10, 1), ("first", 54, 16), ("second", 0, 47)]


def test_a_long_prompt_that_is_mostly_cached_counts_as_short() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=32)
    scheduler.add(make_sequence("seed", list(range(60)), max_tokens=1))
    step(scheduler)
    add_all(scheduler, long=150)
    scheduler.add(make_sequence("cached", list(range(62))))
    assert next_chunks(scheduler) == [("cached", 60, 2), ("long", 0, 62)]


def test_partial_prefills_are_limited() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=64, long_prefill_token_threshold=32, max_num_partial_prefills=1
    )
    add_all(scheduler, long=100, short=4)
    assert next_chunks(scheduler) == [("long", 0, 64)]
    assert next_chunks(scheduler) == [("long", 64, 36)]
    assert next_chunks(scheduler) == [("long", 100, 1), ("short", 0, 4)]


def test_two_long_prompts_share_the_budget_when_two_are_allowed() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=64, long_prefill_token_threshold=32, max_long_partial_prefills=2
    )
    add_all(scheduler, a=100, b=100, short=4)
    assert next_chunks(scheduler) == [("a", 0, 32), ("b", 0, 32)]


def test_a_decode_without_room_preempts_the_latest_arrival() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    sequences = add_all(scheduler, a=12, b=12)
    step(scheduler)
    assert next_chunks(scheduler) == [("a", 12, 1)]
    victim = sequences["b"]
    assert victim.status is SequenceStatus.WAITING and victim.num_preemptions == 1
    assert victim.block_table == [] and victim.num_computed_tokens == 0
    assert victim.output_token_ids == [7] and scheduler.num_preempted == 1
    assert scheduler.audit() == []


def test_the_latest_arrival_preempts_itself_for_its_own_room() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    sequences = add_all(scheduler, a=9, b=12)
    step(scheduler)
    assert next_chunks(scheduler) == [("a", 9, 1)]
    assert sequences["b"].num_preemptions == 1


def test_an_import_that_waits_for_a_place_is_preempted_before_older_sequences() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    add_all(scheduler, a=8, b=6)
    step(scheduler)
    imported = make_sequence("c", 7, outputs=[3])
    imported.num_computed_tokens = 7
    imported.block_table = pool_of(scheduler).allocate(2) or []
    scheduler.add_computed(imported)
    assert next_chunks(scheduler) == [("a", 8, 1), ("b", 6, 1)]
    assert imported.num_preemptions == 1 and scheduler.num_preempted == 1


def test_a_preempted_sequence_is_recomputed_with_its_outputs_once_there_is_room() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    sequences = add_all(scheduler, a=12, b=12)
    step(scheduler)
    step(scheduler)
    scheduler.abort(sequences["a"].key)
    assert next_chunks(scheduler) == [("b", 0, 13)]
    assert sequences["b"].output_token_ids == [7, 7]


def test_the_prefix_cache_makes_recomputing_cheap_and_is_not_reported_as_a_hit() -> None:
    scheduler = make_scheduler(num_blocks=6)
    sequences = add_all(scheduler, a=12, b=12)
    step(scheduler)
    step(scheduler)
    scheduler.abort(sequences["a"].key)
    assert next_chunks(scheduler) == [("b", 8, 5)]
    assert sequences["b"].num_cached_tokens == 0


def test_preempted_sequences_come_back_before_fresh_ones() -> None:
    scheduler = make_scheduler(num_blocks=9, enable_prefix_caching=False)
    sequences = add_all(scheduler, a=12, b=12, c=12)
    step(scheduler)
    add_all(scheduler, d=4)
    step(scheduler)
    assert [sequences[name].num_preemptions for name in "abc"] == [0, 0, 1]
    scheduler.abort(sequences["a"].key)
    scheduler.abort(sequences["b"].key)
    assert next_chunks(scheduler) == [("c", 0, 13), ("d", 0, 4)]


def test_an_admission_leaves_a_block_for_the_decodes_to_grow_into() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    sequences = add_all(scheduler, a=12)
    step(scheduler)
    add_all(scheduler, b=8)
    # Two blocks are free once the decode has its fourth: enough for b, without one to spare.
    assert next_chunks(scheduler) == [("a", 12, 1)]
    scheduler.abort(sequences["a"].key)
    assert next_chunks(scheduler) == [("b", 0, 8)]


def test_a_prefill_is_not_preempted_for_a_decode() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=8)
    sequences = add_all(scheduler, a=7)
    step(scheduler)
    sequences |= add_all(scheduler, b=68)
    for _ in range(5):
        step(scheduler)
    assert next_chunks(scheduler) == [("b", 35, 8)]
    assert sequences["a"].num_preemptions == 1 and sequences["b"].num_preemptions == 0


def test_preemptions_make_no_room_for_admissions_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    add_all(scheduler, a=12, b=20)
    step(scheduler)
    add_all(scheduler, c=4)
    assert next_chunks(scheduler) == [("a", 12, 1)]
    assert scheduler.num_waiting == 2


def test_none_is_scheduled_while_others_hold_the_pool_and_work_goes_on_afterwards() -> None:
    scheduler = make_scheduler(num_blocks=4)
    add_all(scheduler, a=8)
    imported = pool_of(scheduler).allocate(3)
    assert imported is not None
    assert scheduler.schedule() is None and scheduler.has_work
    pool_of(scheduler).release(imported)
    assert next_chunks(scheduler) == [("a", 0, 8)]


def test_an_import_runs_in_the_step_in_which_all_others_had_to_go() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1, enable_prefix_caching=False)
    late = make_sequence("late", 8)
    scheduler.add(late)
    step(scheduler)
    early = make_sequence("early", 5, outputs=[3])
    early.num_computed_tokens = 5
    early.block_table = pool_of(scheduler).allocate(2) or []
    scheduler.add_computed(early)
    # As after a recomputation of `late`, which arrived after the import then.
    late.arrival, early.arrival = early.arrival, late.arrival
    assert next_chunks(scheduler) == [("early", 5, 1)]


def test_prompts_get_a_small_part_of_a_step_that_decodes_too() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_prefill_tokens_beside_decodes=10)
    add_all(scheduler, decode=40)
    assert next_chunks(scheduler) == [("decode", 0, 40)]
    add_all(scheduler, prompt=25)
    assert next_chunks(scheduler) == [("decode", 40, 1), ("prompt", 0, 10)]


def test_a_sequence_that_comes_with_its_blocks_computes_what_is_not_cached() -> None:
    scheduler = make_scheduler()
    pool = pool_of(scheduler)
    sequence = make_sequence("allocated", 3 * pool.block_size + 1)
    sequence.block_table = pool.allocate(4)
    sequence.num_computed_tokens = pool.block_size
    scheduler.add_allocated(sequence)
    size = pool.block_size
    assert sequence.num_cached_tokens == size
    assert next_chunks(scheduler) == [("allocated", size, 2 * size + 1)]
    assert scheduler.audit() == []


def test_a_second_long_prompt_that_came_with_its_blocks_waits_for_the_first() -> None:
    scheduler = make_scheduler(
        num_blocks=100, max_num_batched_tokens=64, long_prefill_token_threshold=32
    )
    for name in ("first", "second"):
        sequence = make_sequence(name, 100)
        sequence.block_table = pool_of(scheduler).allocate(25) or []
        scheduler.add_allocated(sequence)
    assert next_chunks(scheduler) == [("first", 0, 64)]
    assert next_chunks(scheduler) == [("first", 64, 36)]
    assert next_chunks(scheduler) == [("first", 100, 1), ("second", 0, 63)]
