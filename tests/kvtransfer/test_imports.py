"""The import state machine: granted blocks, announcements, quarantine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from core.errors import InvalidArgument, TransferError
from kvtransfer.base import BlockCopy, BlockPart
from kvtransfer.imports import Announcement, ImportTable, PoolActions

KEY = ("r1", 1)


class Bench:
    """An import table that writes down what it does to the pool."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions: list[tuple[str, list[int]]] = []
        pool = PoolActions(self._note("release"), self._note("quarantine"), self._note("settle"))
        self.table = ImportTable(120.0, 100, lambda: self.now, pool)

    def _note(self, name: str):  # type: ignore[no-untyped-def]
        def note(blocks: Iterable[int]) -> None:
            if listed := list(blocks):
                self.actions.append((name, listed))

        return note

    def announce(
        self,
        sequence: int,
        first: int,
        blocks: list[int],
        is_last: bool = False,
        part: tuple[int, int] | None = None,
    ) -> list[BlockCopy] | None:
        news = Announcement(sequence, first, blocks, is_last, BlockPart(*part) if part else None)
        return self.table.announce(KEY, news)

    def read(self, num_copies: int) -> None:
        self.table.begin_read(KEY)
        self.table.end_read(KEY, num_copies)

    def read_all(self) -> None:
        self.announce(0, 1, [50, 51, 52], is_last=True)
        self.read(3)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.table.grant(KEY, held=[7], fresh=[10, 11, 12])
    return bench


def test_announced_blocks_land_behind_the_held_ones(bench: Bench) -> None:
    assert bench.announce(0, 1, [50, 51]) == [BlockCopy(50, 10), BlockCopy(51, 11)]
    bench.read(2)
    assert bench.announce(1, 3, [52], is_last=True) == [BlockCopy(52, 12)]
    bench.read(1)
    bench.table.begin_release(KEY)
    assert bench.table.commit(KEY, lease_held=True).block_table == [7, 10, 11, 12]
    assert bench.actions == []
    assert bench.table.num_open == 0


def test_what_was_read_without_a_lease_is_given_up(bench: Bench) -> None:
    bench.read_all()
    bench.table.begin_release(KEY)
    assert bench.table.commit(KEY, lease_held=False) is None
    assert bench.actions == [("release", [7]), ("release", [10, 11, 12])]
    assert bench.table.num_open == 0


def test_the_lease_is_asked_for_only_when_everything_is_announced_and_read(bench: Bench) -> None:
    bench.announce(0, 1, [50, 51])
    bench.read(2)
    with pytest.raises(AssertionError, match="incomplete"):
        bench.table.begin_release(KEY)
    bench.announce(1, 3, [52], is_last=True)
    with pytest.raises(AssertionError, match="incomplete"):
        bench.table.begin_release(KEY)
    bench.table.begin_read(KEY)
    with pytest.raises(AssertionError, match="incomplete"):
        bench.table.begin_release(KEY)
    bench.table.end_read(KEY, 1)
    bench.table.begin_release(KEY)


def test_a_failed_read_cannot_be_released(bench: Bench) -> None:
    bench.announce(0, 1, [50, 51, 52], is_last=True)
    bench.read(0)
    with pytest.raises(AssertionError, match="incomplete"):
        bench.table.begin_release(KEY)


def test_nothing_is_committed_that_was_not_released(bench: Bench) -> None:
    bench.read_all()
    with pytest.raises(AssertionError, match="not released"):
        bench.table.commit(KEY, lease_held=True)


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_key_is_granted_once(bench: Bench, is_committed: bool) -> None:
    assert not bench.table.has_ended(KEY)
    if is_committed:
        bench.read_all()
        bench.table.begin_release(KEY)
        bench.table.commit(KEY, lease_held=True)
    else:
        bench.announce(0, 1, [50])
        bench.table.begin_read(KEY)
        bench.table.abort(KEY)
    assert bench.table.has_ended(KEY)
    with pytest.raises(AssertionError, match="granted twice"):
        bench.table.grant(KEY, held=[], fresh=[1])


def test_ends_are_forgotten_but_not_before_an_import_may_be_silent_no_longer(bench: Bench) -> None:
    bench.table.abort(KEY)
    for now, name, is_known in ((119, "r2", True), (121, "r3", False)):
        bench.now = now
        bench.table.grant((name, 1), held=[], fresh=[1])
        bench.table.abort((name, 1))
        assert bench.table.has_ended(KEY) is is_known


def test_a_repeated_announcement_reads_nothing_again(bench: Bench) -> None:
    bench.announce(0, 1, [50, 51])
    assert bench.announce(0, 1, [50, 51]) is None


@pytest.mark.parametrize(
    ("sequence", "first", "blocks", "is_last", "error"),
    [
        (1, 1, [50], False, TransferError),
        (0, 2, [50], False, InvalidArgument),
        (0, 1, [50, 51, 52, 53], False, InvalidArgument),
        (0, 1, [50], True, InvalidArgument),
    ],
)
def test_a_wrong_announcement_is_refused_and_changes_nothing(
    bench: Bench,
    sequence: int,
    first: int,
    blocks: list[int],
    is_last: bool,
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        bench.announce(sequence, first, blocks, is_last)
    assert bench.announce(0, 1, [50, 51, 52], is_last=True) is not None


def test_an_announcement_for_an_unknown_attempt_is_refused(bench: Bench) -> None:
    with pytest.raises(TransferError):
        bench.table.announce(("r1", 2), Announcement(0, 1, [50], False))


def test_an_announcement_is_acknowledged_again_after_the_commit(bench: Bench) -> None:
    bench.read_all()
    bench.table.begin_release(KEY)
    bench.table.commit(KEY, lease_held=True)
    assert bench.announce(0, 1, [50, 51, 52], is_last=True) is None
    with pytest.raises(TransferError):
        bench.announce(1, 4, [], is_last=True)


def test_an_announcement_for_what_was_given_up_is_refused(bench: Bench) -> None:
    bench.read_all()
    bench.table.begin_release(KEY)
    bench.table.commit(KEY, lease_held=False)
    with pytest.raises(TransferError):
        bench.announce(0, 1, [50, 51, 52], is_last=True)


def test_an_abort_without_a_read_frees_at_once(bench: Bench) -> None:
    bench.table.abort(KEY)
    bench.table.abort(KEY)
    assert bench.actions == [("release", [7]), ("release", [10, 11, 12])]


def test_an_abort_during_a_read_quarantines_until_it_settles(bench: Bench) -> None:
    bench.announce(0, 1, [50])
    bench.table.begin_read(KEY)
    bench.table.abort(KEY)
    assert bench.actions == [("release", [7]), ("quarantine", [10, 11, 12])]
    assert bench.table.num_open == 1
    bench.table.end_read(KEY, 0)
    assert bench.actions[2:] == [("settle", [10, 11, 12])]
    assert bench.table.num_open == 0


def test_an_aborting_import_takes_no_announcement(bench: Bench) -> None:
    bench.announce(0, 1, [50])
    bench.table.begin_read(KEY)
    bench.table.abort(KEY)
    with pytest.raises(TransferError):
        bench.announce(1, 2, [51])


def test_silence_has_an_expiry_that_every_announcement_moves(bench: Bench) -> None:
    bench.now = 119
    bench.announce(0, 1, [50])
    bench.now = 121
    assert bench.table.reap() == []
    bench.now = 240
    assert bench.table.reap() == [KEY]
    assert bench.actions == [("release", [7]), ("release", [10, 11, 12])]


def test_quarantine_has_no_expiry(bench: Bench) -> None:
    bench.table.begin_read(KEY)
    bench.now = 121
    assert bench.table.reap() == [KEY]
    bench.now = 10_000
    assert bench.table.reap() == []
    assert bench.actions == [("release", [7]), ("quarantine", [10, 11, 12])]


def test_parts_of_the_same_blocks_follow_each_other(bench: Bench) -> None:
    copies = [BlockCopy(50, 10), BlockCopy(51, 11)]
    assert bench.announce(0, 1, [50, 51], part=(0, 30)) == copies
    assert bench.announce(1, 1, [50, 51], part=(30, 50)) == copies
    assert bench.announce(2, 1, [50, 51], part=(80, 20)) == copies
    assert bench.announce(3, 3, [52], is_last=True) == [BlockCopy(52, 12)]
    for num_copies in (2, 2, 2, 1):
        bench.read(num_copies)
    bench.table.begin_release(KEY)
    assert bench.table.commit(KEY, True).block_table == [7, 10, 11, 12]


@pytest.mark.parametrize(
    ("blocks", "part", "is_last"),
    [
        ([50, 51], (40, 60), False),
        ([50, 51], (20, 10), False),
        ([50, 51], (30, 0), False),
        ([50, 51], (30, 80), False),
        ([50], (30, 70), False),
        ([50, 51, 52], (30, 70), False),
        ([50, 51], None, False),
    ],
)
def test_a_part_with_a_gap_is_refused_and_changes_nothing(
    bench: Bench, blocks: list[int], part: tuple[int, int] | None, is_last: bool
) -> None:
    bench.announce(0, 1, [50, 51], part=(0, 30))
    with pytest.raises(InvalidArgument):
        bench.announce(1, 1, blocks, is_last, part)
    assert bench.announce(1, 1, [50, 51], part=(30, 70)) is not None


def test_the_last_announcement_completes_its_blocks(bench: Bench) -> None:
    with pytest.raises(InvalidArgument):
        bench.announce(0, 1, [50, 51, 52], is_last=True, part=(0, 30))


@pytest.mark.parametrize("is_reading", [True, False])
def test_spare_blocks_are_free_at_once_when_the_import_is_given_up(is_reading: bool) -> None:
    bench = Bench()
    bench.table.grant(KEY, held=[7], fresh=[10], spare=[20, 21])
    if is_reading:
        bench.announce(0, 1, [50])
        bench.table.begin_read(KEY)
    bench.table.abort(KEY)
    rest = ("quarantine", [10]) if is_reading else ("release", [10])
    assert bench.actions == [("release", [7, 20, 21]), rest]


def test_a_commit_hands_the_spare_blocks_over_too() -> None:
    bench = Bench()
    bench.table.grant(KEY, held=[7], fresh=[10], spare=[20, 21])
    bench.announce(0, 1, [50], is_last=True)
    bench.read(1)
    bench.table.begin_release(KEY)
    committed = bench.table.commit(KEY, lease_held=True)
    assert committed is not None
    assert (committed.block_table, committed.spare) == ([7, 10], [20, 21])
    assert bench.actions == []
