"""A load is fixed before it is sent."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bench.routing_trace import Request
from bench.serve_load import (
    DrawSizes,
    Lengths,
    Planned,
    Prompts,
    make_load,
    poisson,
    sizes_between,
    sizes_of_trace,
)


def traced(num_prompt: int, num_outputs: int) -> Request:
    return Request(arrival_s=0.0, num_prompt=num_prompt, num_outputs=num_outputs, hash_ids=())


def load_of(sizes: DrawSizes, num_shared: int = 0, seed: int = 0) -> list[Planned]:
    draw = random.Random(seed)
    return make_load([0.0, 1.0], sizes, Prompts(32000, draw, num_shared), draw)


def test_arrivals_come_at_the_rate_and_never_late() -> None:
    times = poisson(rate=50.0, seconds=100.0, draw=random.Random(1))
    assert times == sorted(times)
    assert times[-1] < 100.0
    assert len(times) == pytest.approx(5000, rel=0.05)


def test_gaps_between_arrivals_are_as_spread_as_they_are_long() -> None:
    times = poisson(rate=10.0, seconds=1000.0, draw=random.Random(2))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.05)


def test_a_seed_makes_one_load() -> None:
    sizes = sizes_between(Lengths(3, 9), Lengths(1, 4))
    first, again, other = (load_of(sizes, seed=seed) for seed in (7, 7, 8))
    assert first == again != other
    assert [planned.due_s for planned in first] == [0.0, 1.0]


@pytest.mark.parametrize(("text", "lengths"), [("512", (512, 512)), ("100-1000", (100, 1000))])
def test_lengths_are_one_number_or_two(text: str, lengths: tuple[int, int]) -> None:
    assert Lengths.parse(text) == Lengths(*lengths)


@pytest.mark.parametrize("text", ["", "0", "9-3", "-5", "many", "1-2-3"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_drawn_lengths_reach_both_ends() -> None:
    draw = random.Random(0)
    assert {Lengths(2, 4).draw(draw) for _ in range(100)} == {2, 3, 4}


def test_a_trace_gives_both_lengths_together_and_none_that_does_not_fit() -> None:
    sizes = sizes_of_trace([traced(10, 5), traced(20, 1), traced(90, 11)], max_tokens=100)
    draw = random.Random(0)
    assert {sizes(draw) for _ in range(50)} == {(10, 5), (20, 1)}


def test_a_trace_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 14 tokens"):
        sizes_of_trace([traced(10, 5)], max_tokens=14)


def test_prompts_have_nothing_in_common() -> None:
    sizes = sizes_between(Lengths(64, 64), Lengths(1, 1))
    first, second = load_of(sizes)
    assert len(first.prompt) == len(second.prompt) == 64
    assert first.prompt[:8] != second.prompt[:8]


def test_prompts_share_as_many_tokens_as_asked_for() -> None:
    sizes = sizes_between(Lengths(64, 64), Lengths(1, 1))
    first, second = load_of(sizes, num_shared=48)
    assert first.prompt[:48] == second.prompt[:48]
    assert first.prompt[48:] != second.prompt[48:]


def test_a_prompt_is_never_longer_than_drawn_for_what_is_shared() -> None:
    sizes = sizes_between(Lengths(16, 16), Lengths(1, 1))
    first, second = load_of(sizes, num_shared=48)
    assert first.prompt == second.prompt and len(first.prompt) == 16
