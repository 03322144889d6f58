"""How a chunk's transfer is cut into groups of layers, and what that is decided from."""

from __future__ import annotations

import pytest

from kvtransfer.link import LinkEstimate, LinkMeter
from prefill_svc.overlap import Chunk, exposed_s, layer_boundaries
from worker.compute_meter import ComputeMeter

SHARED_MEMORY = LinkEstimate(bytes_per_s=10e9, overhead_s=1e-3)
GIGABIT = LinkEstimate(bytes_per_s=125e6, overhead_s=1e-3)
SHORT = Chunk(num_layers=30, num_bytes=3_000_000, compute_s=0.2)
LONG = Chunk(num_layers=30, num_bytes=46_000_000, compute_s=3.0)


def test_a_short_prompt_over_shared_memory_goes_in_one_piece() -> None:
    assert layer_boundaries(SHORT, SHARED_MEMORY) == frozenset()


def test_a_long_prompt_over_a_slow_link_goes_in_many_even_groups() -> None:
    boundaries = sorted(layer_boundaries(LONG, GIGABIT))
    assert len(boundaries) >= 9
    assert boundaries[-1] < 30
    steps = [b - a for a, b in zip([0, *boundaries], [*boundaries, 30], strict=True)]
    assert max(steps) - min(steps) <= 1


def test_the_groups_hide_most_of_the_serial_transfer() -> None:
    serial_s = exposed_s(LONG, GIGABIT, 1)
    num_groups = len(layer_boundaries(LONG, GIGABIT)) + 1
    assert exposed_s(LONG, GIGABIT, num_groups) < 0.3 * serial_s


def test_a_link_slower_than_the_computation_exposes_what_does_not_fit() -> None:
    slow = LinkEstimate(bytes_per_s=10e6, overhead_s=0.0)
    assert exposed_s(LONG, slow, 30) == pytest.approx(3.0 / 30 + 4.6 - 3.0)


@pytest.mark.parametrize(
    ("chunk", "link"),
    [
        (Chunk(30, 46_000_000, 0.0), GIGABIT),
        (LONG, LinkEstimate()),
        (Chunk(30, 0, 3.0), GIGABIT),
    ],
)
def test_without_a_measured_speed_nothing_is_cut(chunk: Chunk, link: LinkEstimate) -> None:
    assert layer_boundaries(chunk, link) == frozenset()


def test_a_meter_finds_the_speed_and_the_overhead_of_a_link() -> None:
    meter = LinkMeter()
    assert meter.estimate().bytes_per_s == 0
    for num_bytes in (1e6, 20e6, 5e6, 40e6):
        meter.observe(int(num_bytes), 0.002 + num_bytes / 1e9)
    assert meter.estimate().bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert meter.estimate().overhead_s == pytest.approx(0.002, rel=0.01)


def test_a_meter_that_saw_one_size_only_splits_off_an_assumed_overhead() -> None:
    meter = LinkMeter()
    for _ in range(3):
        meter.observe(10_000_000, 0.011)
    assert meter.estimate().bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_a_meter_follows_a_link_that_has_become_slower() -> None:
    meter = LinkMeter()
    for speed in (1e9, 1e8):
        for num_bytes in range(1_000_000, 60_000_000, 1_000_000):
            meter.observe(num_bytes, 0.001 + num_bytes / speed)
    assert meter.estimate().bytes_per_s == pytest.approx(1e8, rel=0.3)


def test_compute_speed_is_learned_from_steps() -> None:
    meter = ComputeMeter()
    assert meter.expected_s(100) == 0
    for _ in range(20):
        meter.observe(1000, 2.0)
    assert meter.expected_s(500) == pytest.approx(1.0)
