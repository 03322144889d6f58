"""Things that take turns, and what is made of what they gave."""

from __future__ import annotations

from functools import partial

import pytest

from bench.turns import in_turns, median_difference, median_ratio


def test_each_runs_once_a_round_and_every_second_round_goes_backwards() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = in_turns(3, {name: partial(run, name) for name in ("a", "b", "c")})
    assert "".join(order) == "abccbaabc"
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_what_is_compared_is_compared_within_a_round() -> None:
    # The machine takes twice as long in the second round, for both.
    ours, theirs = [30.0, 60.0, 33.0], [20.0, 40.0, 20.0]
    assert median_ratio(ours, theirs) == 1.5
    assert median_difference(ours, theirs) == 13.0


def test_rounds_that_only_one_of_two_ran_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])
