"""The export state machine: pinned blocks, leases, answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from kvtransfer.exports import ExportTable, LeaseConfig

KEY = ("r1", 1)


class Bench:
    """An export table over a counting pool and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.references: Counter[int] = Counter()
        config = LeaseConfig(lease_s=10, max_lease_s=25, pin_s=600)
        self.table = ExportTable(config, lambda: self.now, self._acquire, self._release)

    def _acquire(self, blocks: Iterable[int]) -> None:
        self.references.update(blocks)

    def _release(self, blocks: Iterable[int]) -> None:
        self.references.subtract(blocks)

    @property
    def pinned(self) -> list[int]:
        return sorted(block for block, count in self.references.items() if count)

    def announce(self) -> None:
        self.table.open(KEY)
        self.table.pin(KEY, [3, 4])
        assert self.table.announced(KEY)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_release_within_the_lease_answers_true_and_frees_the_blocks(bench: Bench) -> None:
    bench.announce()
    assert bench.pinned == [3, 4]
    bench.now += 9
    assert bench.table.release(KEY) is True
    assert bench.pinned == []
    assert bench.table.num_open == 0


def test_a_release_after_the_lease_answers_false_even_if_nobody_reaped(bench: Bench) -> None:
    bench.announce()
    bench.now += 10.5
    assert bench.table.release(KEY) is False
    assert bench.pinned == []


def test_a_repeated_release_repeats_its_answer(bench: Bench) -> None:
    bench.announce()
    assert [bench.table.release(KEY) for _ in range(3)] == [True, True, True]
    assert bench.pinned == []


def test_an_unknown_release_answers_false_and_changes_nothing(bench: Bench) -> None:
    bench.announce()
    assert bench.table.release(("r1", 2)) is False
    assert bench.pinned == [3, 4]


def test_a_release_before_the_last_announcement_revokes(bench: Bench) -> None:
    bench.table.open(KEY)
    bench.table.pin(KEY, [3, 4])
    assert bench.table.release(KEY) is False
    assert bench.pinned == []
    assert bench.table.announced(KEY) is False


def test_renewals_carry_the_lease_to_its_cap_and_no_further(bench: Bench) -> None:
    bench.announce()
    for _ in range(3):
        bench.now += 8
        assert bench.table.renew(KEY)
    bench.now += 2
    assert bench.table.renew(KEY) is False
    assert bench.table.release(KEY) is False


def test_the_reaper_frees_what_nobody_released(bench: Bench) -> None:
    bench.announce()
    bench.now += 11
    assert [export.key for export in bench.table.reap()] == [KEY]
    assert bench.pinned == []
    assert bench.table.release(KEY) is False


def test_an_export_of_a_stuck_prefill_expires_too(bench: Bench) -> None:
    bench.table.open(KEY)
    bench.table.pin(KEY, [3])
    bench.now += 601
    bench.table.reap()
    assert bench.pinned == []


def test_pinning_after_the_end_takes_no_reference(bench: Bench) -> None:
    bench.table.open(KEY)
    bench.table.revoke(KEY)
    bench.table.pin(KEY, [3])
    assert bench.pinned == []


def test_a_key_is_exported_once(bench: Bench) -> None:
    bench.announce()
    bench.table.release(KEY)
    with pytest.raises(AssertionError, match="opened twice"):
        bench.table.open(KEY)


def test_old_answers_are_forgotten(bench: Bench) -> None:
    bench.announce()
    bench.table.release(KEY)
    bench.now += 26
    bench.table.reap()
    assert bench.table.release(KEY) is False


def test_what_is_lent_has_its_lease_from_the_start_and_is_counted_apart(bench: Bench) -> None:
    bench.announce()
    bench.table.lend(("fetch", 0), [4, 5, 6])
    assert (bench.table.num_pinned_blocks, bench.table.num_lent_blocks) == (5, 3)
    assert bench.references[4] == 2
    bench.now += 9
    assert bench.table.release(("fetch", 0)) is True
    assert (bench.pinned, bench.table.num_lent_blocks) == ([3, 4], 0)
    assert bench.table.is_known(("fetch", 0))


def test_what_is_lent_expires_without_a_renewal(bench: Bench) -> None:
    bench.table.lend(("fetch", 0), [4, 5])
    bench.now += 10.5
    assert [export.key for export in bench.table.reap()] == [("fetch", 0)]
    assert bench.pinned == []
    assert bench.table.release(("fetch", 0)) is False
