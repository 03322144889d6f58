"""The forecast of the first token, and what it is learned from."""

import math
import random

import pytest

from router.admission_model import (
    Backlog,
    Forecast,
    Margin,
    OutputMeter,
    RatioMeter,
    SpeedMeter,
    excess_s,
    forecast,
)


def test_a_prompt_waits_for_what_is_before_it_and_is_computed_by_one_worker():
    backlog = Backlog(tokens_ahead=3000, tokens_per_s=2000, num_prefill=2)
    assert forecast(backlog, 500) == Forecast(wait_s=1.5, prefill_s=0.5)


def test_the_longer_of_both_waits_counts():
    backlog = Backlog(1000, 2000, 1, blocks_short=60, blocks_per_s=20)
    assert forecast(backlog, 0).wait_s == 3.0
    backlog = Backlog(8000, 2000, 1, blocks_short=60, blocks_per_s=20)
    assert forecast(backlog, 0).wait_s == 4.0
    assert forecast(Backlog(0, 2000, 1, blocks_short=9, blocks_per_s=math.inf), 0).wait_s == 0.0


@pytest.mark.parametrize(
    ("wait_s", "prefill_s", "excess"),
    [
        (0.2, 0.3, -0.25),
        (0.6, 0.3, 0.35),
        # Too long for the limit by itself: only the wait counts.
        (0.4, 0.9, -0.4),
        (1.0, 0.9, 0.5),
    ],
)
def test_a_first_token_is_late_by_forecast_times_margin_over_limit(wait_s, prefill_s, excess):
    late = excess_s(Forecast(wait_s, prefill_s), margin=1.5, limit_s=1.0)
    assert late == pytest.approx(excess)


def test_a_speed_is_known_from_the_first_sample_and_follows_the_newest():
    meter = SpeedMeter()
    assert meter.value is None
    meter.add(1000, 2.0)
    assert meter.value == 500
    for _ in range(20):
        meter.add(1000, 1.0)
    assert meter.value == pytest.approx(1000, rel=0.01)


def test_prompts_that_end_together_are_one_sample():
    meter = SpeedMeter()
    for _ in range(50):
        meter.add(100, 0.5)
        for _ in range(9):
            meter.add(100, 0.0)
    assert meter.value == pytest.approx(2000, rel=0.15)


def test_a_ratio_weighs_samples_by_their_spans():
    meter = RatioMeter()
    meter.add(30, 10, decay=0.5)
    meter.add(5, 5, decay=0.5)
    assert meter.value == 2.0


def test_an_answers_length_is_expected_within_what_the_request_allows():
    meter = OutputMeter()
    assert meter.expected(max_tokens=16) == 16
    for _ in range(500):
        meter.add(20)
    assert meter.expected(max_tokens=4096) == 21


def test_the_margin_comes_to_cover_nineteen_of_twenty():
    margin, rng = Margin(), random.Random(1)
    draws = [rng.uniform(0.5, 2.5) for _ in range(6000)]
    covered = 0
    for index, actual in enumerate(draws):
        covered += index >= 1000 and actual <= margin.value
        margin.observe(1.0, actual)
    assert covered / 5000 == pytest.approx(0.95, abs=0.015)


def test_the_margin_has_bounds():
    margin = Margin()
    for _ in range(1000):
        margin.observe(1.0, 100.0)
    assert margin.value == 4.0
    for _ in range(5000):
        margin.observe(1.0, 0.1)
    assert margin.value == 1.0
