"""What a benchmark reads out of the arrivals of tokens."""

from __future__ import annotations

import pytest

from bench.timing import Estimate, Timing


def test_exposed_time_is_what_the_second_token_takes_beyond_a_usual_one() -> None:
    timing = Timing.of(10.0, [10.5, 10.8, 10.9, 11.0, 11.4])
    assert timing.ttft_s == pytest.approx(0.5)
    assert timing.itl_s == pytest.approx(0.1)
    assert timing.exposed_s == pytest.approx(0.2)
    assert timing.total_s == pytest.approx(1.4)


def test_an_interval_covers_the_median_and_not_an_outlier() -> None:
    estimate = Estimate.of([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.01, 5.0])
    assert 0.98 <= estimate.low <= estimate.median <= estimate.high <= 1.02
    assert estimate.median == pytest.approx(1.005)


def test_equal_values_leave_no_doubt() -> None:
    assert str(Estimate.of([0.5, 0.5, 0.5])) == "0.500, 95 % CI 0.500 to 0.500"
