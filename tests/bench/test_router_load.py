"""What a token costs, by loads that differ in the length of answers."""

from __future__ import annotations

import pytest

from bench.router_load import Load, TokenLoads


def loads(short_s: float, long_s: float) -> TokenLoads:
    short, long = (
        Load(
            num_requests=10,
            num_tokens=num_tokens,
            seconds=1.0,
            ttft_p50_ms=1.0,
            ttft_p99_ms=1.0,
            cpu_s=cpu_s,
        )
        for num_tokens, cpu_s in ((1000, short_s), (11_000, long_s))
    )
    return TokenLoads(short, long)


def test_a_token_costs_the_difference_of_the_two() -> None:
    assert loads(0.1, 0.3).us_per_token == pytest.approx(20.0)


def test_a_round_whose_short_load_was_disturbed_makes_tokens_no_cheaper() -> None:
    rounds = [loads(0.1, 0.5), loads(0.25, 0.3), loads(0.2, 0.4)]
    assert min(each.us_per_token for each in rounds) == pytest.approx(5.0)
    assert TokenLoads.least_us(rounds) == pytest.approx(20.0)
