"""The autoscaler's arithmetic, by examples."""

import pytest

from bench.hpa import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    Autoscaler,
    Behavior,
    Change,
    Rate,
    Rules,
    num_oscillations,
    wish_of_total,
    wish_of_utilization,
)


def autoscaler(up=DEFAULT_UP, down=DEFAULT_DOWN, most=100):
    return Autoscaler(Behavior(min_replicas=1, max_replicas=most, up=up, down=down))


@pytest.mark.parametrize(
    ("total", "current", "wish"),
    [
        (21, 2, 2),
        (20, 2, 2),
        (23, 2, 3),
        (18.1, 2, 2),
        (17, 2, 2),
        (9, 2, 1),
        (0, 2, 0),
    ],
)
def test_a_total_asks_for_as_many_pods_as_it_fills_outside_the_tolerance(total, current, wish):
    assert wish_of_total(total, 10, current) == wish


@pytest.mark.parametrize(("utilization", "wish"), [(0.7, 4), (0.76, 4), (0.8, 5), (0.35, 2)])
def test_a_utilization_asks_in_proportion_to_what_there_is(utilization, wish):
    assert wish_of_utilization(utilization, 0.7, 4) == wish


def test_the_metric_that_asks_for_most_counts():
    assert autoscaler().decide([2, 5, 3], 4, 0.0) == 5


def test_a_metric_that_is_not_available_keeps_from_scaling_down_but_not_up():
    assert autoscaler().decide([2, None], 4, 0.0) == 4
    assert autoscaler().decide([6, None], 4, 0.0) == 6
    assert autoscaler().decide([None, None], 4, 0.0) == 4


def test_it_doubles_or_adds_four_in_a_round():
    assert autoscaler().decide([50], 1, 0.0) == 5
    assert autoscaler().decide([50], 10, 0.0) == 20


def test_a_rate_counts_what_was_changed_within_its_period():
    scaler = autoscaler(up=Rules((Rate("pods", 2, 60.0),)))
    assert scaler.decide([9], 4, 0.0) == 6
    assert scaler.decide([9], 6, 15.0) == 6
    assert scaler.decide([9], 6, 60.0) == 8


def test_it_goes_down_to_the_most_that_was_asked_for_in_the_window():
    scaler = autoscaler()
    assert scaler.decide([8], 8, 0.0) == 8
    assert scaler.decide([6], 8, 150.0) == 8
    assert scaler.decide([3], 8, 300.0) == 8
    assert scaler.decide([3], 8, 301.0) == 6
    assert scaler.decide([3], 6, 451.0) == 3


def test_it_goes_up_to_the_least_that_was_asked_for_in_the_window():
    scaler = autoscaler(up=Rules(DEFAULT_UP.rates, window_s=30.0))
    scaler.decide([2], 2, 0.0)
    assert scaler.decide([6], 2, 15.0) == 2
    assert scaler.decide([5], 2, 45.0) == 5


def test_it_stays_between_least_and_most():
    assert autoscaler(most=3).decide([50], 2, 0.0) == 3
    assert autoscaler(down=Rules(DEFAULT_DOWN.rates)).decide([0], 2, 0.0) == 1


def test_a_direction_that_changes_twice_in_the_window_is_an_oscillation():
    up_down_up = [Change(0, 1, 2), Change(100, 2, 1), Change(200, 1, 2)]
    assert num_oscillations(up_down_up, 300.0) == 1
    assert num_oscillations(up_down_up, 100.0) == 0
    assert num_oscillations([Change(0, 1, 2), Change(15, 2, 4), Change(400, 4, 2)], 300.0) == 0
