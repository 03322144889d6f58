"""Steps that are planned while one is on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.sampling import SamplingParams
from engine.batch import StepBatch
from engine.scheduler import Scheduler
from tests.engine.builders import (
    EOS,
    chunks,
    make_scheduler,
    make_sequence,
    pool_of,
    result_of,
)


def begun(scheduler: Scheduler) -> StepBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def ahead(scheduler: Scheduler) -> StepBatch:
    batch = scheduler.schedule_ahead()
    assert batch is not None
    return batch


def num_referenced(scheduler: Scheduler) -> int:
    assert scheduler.audit() == []
    return pool_of(scheduler).stats().referenced


def test_a_step_ahead_goes_on_with_tokens_that_are_not_known_yet() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6)
    scheduler.add(sequence)
    first, second = begun(scheduler), ahead(scheduler)
    assert chunks(second) == [("a", 6, 1)] and second.sequences[0].awaits_token
    scheduler.postprocess(first, result_of(first, 11))
    third = ahead(scheduler)
    assert chunks(third) == [("a", 7, 1)] and third.sequences[0].output_index == 2
    for batch, token_id in ((second, 12), (third, 13)):
        scheduler.postprocess(batch, result_of(batch, token_id))
    assert sequence.output_token_ids == [11, 12, 13] and scheduler.audit() == []


def test_a_third_step_asserts() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 6))
    begun(scheduler)
    ahead(scheduler)
    with pytest.raises(AssertionError, match="one step is on the device"):
        scheduler.schedule_ahead()


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"max_tokens": 4}])
def test_what_is_sure_to_end_is_not_in_the_step_ahead(limits: dict[str, int]) -> None:
    scheduler = make_scheduler(max_model_len=7)
    scheduler.add(make_sequence("ends", 6, **limits))  # type: ignore[arg-type]
    scheduler.add(make_sequence("goes-on", 3))
    first = begun(scheduler)
    assert chunks(ahead(scheduler)) == [("goes-on", 3, 1)]
    updates = scheduler.postprocess(first, result_of(first))
    assert [update.finish_reason is None for update in updates] == [False, True]
    assert num_referenced(scheduler) == 1


def test_prompts_alone_are_computed_one_step_at_a_time() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(make_sequence("a", 100, max_tokens=1))
    begun(scheduler)
    assert scheduler.schedule_ahead() is None


def test_prompts_ride_along_with_what_goes_on() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_num_partial_prefills=4)
    scheduler.add(make_sequence("a", 6))
    scheduler.add(make_sequence("b", 100))
    assert chunks(begun(scheduler)) == [("a", 0, 6), ("b", 0, 58)]
    scheduler.add(make_sequence("c", 5))
    assert chunks(ahead(scheduler)) == [("a", 6, 1), ("b", 58, 42), ("c", 0, 5)]


def test_the_step_after_a_choice_by_penalties_is_not_planned_ahead() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 6)
    sequence.sampling = SamplingParams(max_tokens=9, presence_penalty=0.5)
    scheduler.add(sequence)
    begun(scheduler)
    assert scheduler.schedule_ahead() is None


def test_the_token_behind_an_end_is_dropped_and_its_block_free_after_its_step() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4)
    scheduler.add(sequence)
    first, second = begun(scheduler), ahead(scheduler)
    (update,) = scheduler.postprocess(first, result_of(first, EOS))
    assert update.finish_reason is not None and sequence.block_table == []
    assert num_referenced(scheduler) == 2 and second.sequences[0].block_table == [0, 1]
    assert scheduler.postprocess(second, result_of(second)) == []
    assert num_referenced(scheduler) == 0 and sequence.output_token_ids == [EOS]


def test_an_aborted_sequence_keeps_its_blocks_until_both_steps_are_over() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", 4)
    scheduler.add(sequence)
    first, second = begun(scheduler), ahead(scheduler)
    scheduler.abort(sequence.key)
    assert scheduler.postprocess(first, result_of(first)) == [] and num_referenced(scheduler) == 2
    assert scheduler.postprocess(second, result_of(second)) == []
    assert num_referenced(scheduler) == 0


def test_a_step_ahead_preempts_nobody() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=12)
    scheduler.add(make_sequence("a", 4))
    scheduler.add(make_sequence("b", 3))
    first = begun(scheduler)
    pool_of(scheduler).allocate(1)
    assert scheduler.schedule_ahead() is None
    scheduler.postprocess(first, result_of(first))
    assert chunks(begun(scheduler)) == [("a", 4, 1)] and scheduler.num_preempted == 1
    assert scheduler.audit() == []


def test_a_copy_is_made_by_the_first_of_two_steps() -> None:
    scheduler = make_scheduler()
    pool = pool_of(scheduler)
    prompt = make_sequence("a", 5, outputs=[1])
    table = pool.allocate(3)
    assert table is not None
    copied = replace(
        prompt, block_table=[table[0], table[2]], copy_source=table[1], num_computed_tokens=5
    )
    scheduler.add_computed(copied)
    first, second = begun(scheduler), ahead(scheduler)
    assert [batch.sequences[0].copy_source for batch in (first, second)] == [table[1], None]
    assert num_referenced(scheduler) == 3
    scheduler.postprocess(first, result_of(first))
    assert copied.copy_source is None and num_referenced(scheduler) == 2
