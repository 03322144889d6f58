"""Up to how many tokens a prompt stays on decode."""

import random

import pytest

from router.local_prefill import (
    MAX_TOKENS,
    MIN_REMEMBERED,
    MIN_TOKENS,
    START_TOKENS,
    LocalPrefillLimit,
)


def learned(handoff_s, prefill_s, decode_s, limit=None, times=100):
    """The limit after so many hand-offs at these speeds."""
    limit = limit or LocalPrefillLimit(None)
    for _ in range(times):
        limit.max_tokens([prefill_s], [decode_s])
        limit.observe_handoff(handoff_s)
    return limit.max_tokens([prefill_s], [decode_s])


def test_a_limit_that_is_given_does_not_change():
    assert learned(1, 0.001, 0.002, LocalPrefillLimit(0)) == 0


def test_it_begins_with_a_usual_value_until_enough_is_known():
    assert learned(0.02, 0.001, 0.002, times=MIN_REMEMBERED - 1) == START_TOKENS
    limit = LocalPrefillLimit(None)
    for _ in range(100):
        limit.max_tokens([], [0.002])
        limit.max_tokens([0.001], [])
        limit.observe_handoff(0.02)
    assert limit.max_tokens([0.001], [0.0012]) == START_TOKENS


def test_it_begins_where_it_is_told_to_and_learns_from_there():
    limit = LocalPrefillLimit(None, start=300)
    assert learned(0.02, 0.001, 0.002, limit, times=0) == 300
    assert learned(0.02, 0.001, 0.0012, limit) == pytest.approx(100)


def test_it_is_where_both_ways_take_equally_long():
    # 100 * 0.001 + 0.02 == 100 * 0.0012
    assert learned(0.02, 0.001, 0.0012) == pytest.approx(100)


def test_it_stays_within_bounds():
    assert learned(0.02, 0.001, 0.5) == MIN_TOKENS
    assert learned(0.02, 0.001, 0.00101) == MAX_TOKENS
    assert learned(0.02, 0.001, 0.0005) == MAX_TOKENS


def test_a_tail_of_slow_hand_offs_does_not_move_it():
    limit = LocalPrefillLimit(None)
    for _ in range(20):
        learned(0.02, 0.001, 0.0012, limit, times=3)
        learned(2.0, 0.001, 0.0012, limit, times=1)
    assert limit.max_tokens([0.001], [0.0012]) == pytest.approx(100)


def test_speeds_that_flicker_move_it_little():
    draw, limit = random.Random(0), LocalPrefillLimit(None)
    limits = []
    for number in range(1000):
        # A token takes 0.2 ms longer on decode, give or take as much.
        speeds = [draw.gauss(0.001, 1e-4)], [draw.gauss(0.0012, 2e-4)]
        limits.append(limit.max_tokens(*speeds))
        limit.observe_handoff(draw.expovariate(1 / 0.03))
        if number == 150:
            limits.clear()
    assert min(limits) > 70
    assert max(limits) < 150


def test_it_follows_what_has_changed_for_good():
    limit = LocalPrefillLimit(None)
    learned(0.02, 0.001, 0.0012, limit)
    assert learned(0.06, 0.001, 0.0012, limit, times=70) == pytest.approx(300)
