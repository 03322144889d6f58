"""Up to how many tokens a prompt stays on decode."""

import pytest

from router.local_prefill import MAX_TOKENS, MIN_TOKENS, START_TOKENS, LocalPrefillLimit


def learned(handoff_s=0.02):
    limit = LocalPrefillLimit(None)
    for _ in range(100):
        limit.observe_handoff(handoff_s)
    return limit


def test_a_limit_that_is_given_does_not_change():
    limit = LocalPrefillLimit(0)
    limit.observe_handoff(1)
    assert limit.max_tokens([0.001], [0.002]) == 0


def test_it_begins_with_a_usual_value_until_all_figures_are_known():
    assert LocalPrefillLimit(None).max_tokens([0.001], [0.002]) == START_TOKENS
    assert learned().max_tokens([], [0.002]) == START_TOKENS
    assert learned().max_tokens([0.001], []) == START_TOKENS


def test_it_is_where_both_ways_take_equally_long():
    # 100 * 0.001 + 0.02 == 100 * 0.0012
    assert learned(0.02).max_tokens([0.001], [0.0012]) == pytest.approx(100)


def test_it_stays_within_bounds():
    assert learned(0.02).max_tokens([0.001], [0.5]) == MIN_TOKENS
    assert learned(0.02).max_tokens([0.001], [0.00101]) == MAX_TOKENS
    assert learned(0.02).max_tokens([0.001], [0.0005]) == MAX_TOKENS


def test_one_slow_hand_off_changes_it_little():
    limit = learned(0.02)
    limit.observe_handoff(0.04)
    assert limit.max_tokens([0.001], [0.0012]) == pytest.approx(110)
