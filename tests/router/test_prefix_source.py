"""Whose prefix a prefill worker is told to take over."""

from __future__ import annotations

import random

from router.prefix_source import choose_source


def choose(held: dict[str, int], avoid: tuple[str, ...] = ()) -> str | None:
    """For prefill worker p, which has to gain 4 blocks."""
    return choose_source(held, "p", 4, random.Random(1), avoid)


def test_the_longest_prefix_is_the_source_whatever_its_role() -> None:
    assert choose({"p": 2, "p1": 8, "d": 9}) == "d"


def test_a_prefix_that_is_hardly_longer_is_computed() -> None:
    assert choose({"p": 5, "d": 8}) is None
    assert choose({"p": 4, "d": 8}) == "d"


def test_the_worker_with_the_longest_prefix_needs_no_source() -> None:
    assert choose({"p": 9, "d": 5}) is None
    assert choose_source({"p": 9, "d": 9}, "p", 0, random.Random(1)) is None
    assert choose({}) is None


def test_a_worker_that_an_attempt_has_failed_on_is_no_source() -> None:
    assert choose({"p": 0, "p1": 8, "d": 9}, avoid=("d",)) == "p1"


def test_equal_sources_share_the_load() -> None:
    rng = random.Random(7)
    chosen = [choose_source({"p": 0, "a": 8, "b": 8}, "p", 4, rng) for _ in range(100)]
    assert 30 < chosen.count("a") < 70
