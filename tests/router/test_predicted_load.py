"""What counts as a worker's load before its reports tell."""

from router.predicted_load import PredictedLoad
from router.routing import Work

A, B = 1, 2


def predicted(*stream_ids):
    load = PredictedLoad()
    for stream_id in stream_ids:
        load.add(stream_id, Work(queued_blocks=10, sequences=1, context_blocks=12))
    return load


def test_a_dispatch_counts_from_when_it_is_sent_to_its_end():
    load = predicted(A, B)
    assert load.total == Work(20, 2, 24)
    load.remove(A)
    assert load.total == Work(10, 1, 12)
    load.remove(B)
    assert load.total == Work()


def test_reports_that_do_not_tell_of_it_leave_it_counting():
    load = predicted(A)
    load.reported([])
    assert load.total == Work(10, 1, 12)


def test_a_report_takes_over_what_it_tells_of():
    load = predicted(A, B)
    load.reported([A])
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
        load.add(index, Work(queued_blocks=0.1 * index))
    for index in range(10):
        load.remove(index)
    assert load.total == Work()
    assert len(load) == 0


def test_what_is_not_known_changes_nothing():
    load = predicted(A)
    load.prefilled(B)
    load.remove(B)
    load.reported([B])
    assert load.total == Work(10, 1, 12)
