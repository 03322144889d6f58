"""What counts as a worker's load before its reports tell."""

from router.predicted_load import PredictedLoad
from router.routing import Work

A, B = ("a", 1), ("b", 1)


def predicted(*keys):
    load = PredictedLoad()
    for key in keys:
        load.add(key, Work(queued_blocks=10, sequences=1, context_blocks=12))
    return load


def test_a_dispatch_counts_from_when_it_is_sent_to_its_end():
    load = predicted(A, B)
    assert load.total == Work(20, 2, 24)
    load.remove(A)
    assert load.total == Work(10, 1, 12)
    load.remove(B)
    assert load.total == Work()


def test_without_reports_it_goes_on_counting_after_it_was_acknowledged():
    load = predicted(A)
    load.acknowledge(A)
    assert load.total == Work(10, 1, 12)


def test_a_report_takes_over_what_was_acknowledged_before_it_came():
    load = predicted(A, B)
    load.acknowledge(A)
    load.reported()
    assert load.total == Work(10, 1, 12)
    load.remove(A)
    load.prefilled(A)
    assert load.total == Work(10, 1, 12)


def test_the_first_token_moves_the_prompt_away_and_leaves_the_sequence():
    load = predicted(A)
    load.prefilled(A)
    load.prefilled(A)
    assert load.total == Work(0, 1, 12)
    load.remove(A)
    assert load.total == Work()


def test_sums_of_fractions_leave_no_crumbs():
    load = PredictedLoad()
    for index in range(10):
        load.add((str(index), 1), Work(queued_blocks=0.1 * index))
    for index in range(10):
        load.remove((str(index), 1))
    assert load.total == Work()
    assert len(load) == 0


def test_what_is_not_known_changes_nothing():
    load = predicted(A)
    for change in (load.acknowledge, load.prefilled, load.remove):
        change(B)
    load.reported()
    assert load.total == Work(10, 1, 12)
