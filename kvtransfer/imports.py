"""The reader's side of a transfer: room granted, blocks pulled, and then owned by somebody.

    GRANTED → PULLING → RELEASING → COMMITTED
        any of these → ABORTING (quarantined until the reads have settled) → gone

Plain bookkeeping: no I/O, no clock of its own; blocks are numbers. An import owns one
reference of every block in `block_table` and `spare` until `commit` hands them to the
sequences or an abort frees them. A given-up read may still write: its destination blocks are
quarantined, without an expiry, until the transport says that it has settled.

A commit needs all three: every block is announced, every announced block is read, and prefill
answered a question asked *after* that with "the lease held". RELEASING is that question.

A key is granted once in the life of a worker: a repeated grant of an attempt that is over
would read from blocks which prefill has released, and get its old answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from core.errors import InvalidArgument, TransferError
from kvtransfer.base import BlockCopy, BlockPart

LEASE_OVER = "the lease of the exported blocks was over before the read"

ImportKey = tuple[str, int]
"""(request_id, attempt)."""


class ImportState(enum.Enum):
    GRANTED = "granted"
    PULLING = "pulling"
    RELEASING = "releasing"
    """Everything is in place; prefill is asked whether the lease held."""
    ABORTING = "aborting"


@dataclass
class Import:
    key: ImportKey
    held: list[int]
    """Leading blocks that decode's own prefix cache provided."""
    fresh: list[int]
    """Destination blocks of the reads."""
    spare: list[int]
    """Further blocks for whom the commit hands them to; no read writes to them."""
    expires_at: float
    state: ImportState = ImportState.GRANTED
    next_sequence: int = 0
    num_announced: int = 0
    part_blocks: int = 0
    """Blocks that are being announced in parts, behind the `num_announced`."""
    part_end: int = 0
    """Bytes of each of them that are announced."""
    is_fully_announced: bool = False
    num_unread: int = 0
    """Copies that were announced and are not in place yet."""
    num_reads: int = 0
    """Reads that have begun and not settled."""

    @property
    def block_table(self) -> list[int]:
        return self.held + self.fresh


@dataclass(frozen=True)
class _End:
    """What is remembered of an import that is gone."""

    num_announcements: int
    """That led to its commit; 0 when it was given up."""
    forget_at: float


@dataclass(frozen=True)
class PoolActions:
    """What an import does to the block pool; each takes block numbers."""

    release: Callable[[Iterable[int]], None]
    quarantine: Callable[[Iterable[int]], None]
    settle: Callable[[Iterable[int]], None]


@dataclass(frozen=True)
class Announcement:
    """Blocks that prefill will not change any more."""

    sequence: int
    first_block: int
    """Index in the request's block table."""
    block_ids: Sequence[int]
    """Of the prefill worker."""
    is_last: bool
    part: BlockPart | None = None
    """Only these bytes of each block; the parts of the same blocks follow each other."""


class ImportTable:
    """Every import of one worker. A block has `block_bytes`."""

    def __init__(
        self,
        timeout_s: float,
        block_bytes: int,
        clock: Callable[[], float],
        pool: PoolActions,
    ) -> None:
        self._timeout_s = timeout_s
        self._block_bytes = block_bytes
        self._clock = clock
        self._pool = pool
        self._imports: dict[ImportKey, Import] = {}
        self._ended: dict[ImportKey, _End] = {}
        """Imports that are gone; the oldest first."""

    @property
    def num_open(self) -> int:
        return len(self._imports)

    @property
    def num_fresh_blocks(self) -> int:
        """Destination blocks of all imports, with those that are quarantined."""
        return sum(len(entry.fresh) for entry in self._imports.values())

    def get(self, key: ImportKey) -> Import | None:
        return self._imports.get(key)

    def has_ended(self, key: ImportKey) -> bool:
        """Whether it was committed or given up, so that it must not be granted again."""
        entry = self._imports.get(key)
        return key in self._ended if entry is None else entry.state is ImportState.ABORTING

    def grant(
        self, key: ImportKey, held: list[int], fresh: list[int], spare: Iterable[int] = ()
    ) -> Import:
        """Begins an import that owns these blocks. The key must be new."""
        is_new = key not in self._imports and key not in self._ended
        assert is_new, f"import {key} granted twice"
        entry = Import(key, held, fresh, list(spare), self._clock() + self._timeout_s)
        self._imports[key] = entry
        return entry

    def announce(self, key: ImportKey, news: Announcement) -> list[BlockCopy] | None:
        """What has to be read now; None for a repeated announcement, also after the commit.

        Raises TransferError for an unknown, given up or skipped one, and InvalidArgument
        for blocks that were not granted; both change nothing.
        """
        entry = self._imports.get(key)
        ended = self._ended.get(key)
        if ended is not None and news.sequence < ended.num_announcements:
            return None
        if entry is None or entry.state is ImportState.ABORTING:
            raise TransferError(f"no import is open for {key[0]} attempt {key[1]}")
        if news.sequence < entry.next_sequence:
            return None
        if news.sequence > entry.next_sequence or entry.is_fully_announced:
            raise TransferError(
                f"announcement {news.sequence} came where {entry.next_sequence} was due"
            )
        start = len(entry.held) + entry.num_announced
        end = news.first_block + len(news.block_ids)
        total = len(entry.held) + len(entry.fresh)
        if news.first_block != start or end > total or (news.is_last and end != total):
            raise InvalidArgument(
                f"blocks {news.first_block} to {end} were announced; "
                f"{start} to {total} are outstanding",
                field="block_ids",
            )
        part = news.part or BlockPart(0, self._block_bytes)
        part_end = part.offset + part.num_bytes
        is_whole = part_end == self._block_bytes
        if (
            part.offset != entry.part_end
            or part.num_bytes < 1
            or part_end > self._block_bytes
            or entry.part_blocks not in (0, len(news.block_ids))
            or (news.is_last and not is_whole)
        ):
            raise InvalidArgument(
                f"bytes {part.offset} to {part_end} of {len(news.block_ids)} blocks were "
                f"announced; byte {entry.part_end} of {entry.part_blocks or 'any'} is due",
                field="part_offset",
            )
        destinations = entry.fresh[entry.num_announced : end - len(entry.held)]
        entry.next_sequence += 1
        entry.num_announced += len(news.block_ids) if is_whole else 0
        entry.part_blocks = 0 if is_whole else len(news.block_ids)
        entry.part_end = 0 if is_whole else part_end
        entry.num_unread += len(news.block_ids)
        entry.is_fully_announced = news.is_last
        entry.expires_at = self._clock() + self._timeout_s
        return [BlockCopy(*pair) for pair in zip(news.block_ids, destinations, strict=True)]

    def begin_read(self, key: ImportKey) -> None:
        """A read into this import's blocks is about to be issued."""
        entry = self._imports[key]
        assert entry.state is not ImportState.ABORTING, f"import {key} was given up"
        entry.state = ImportState.PULLING
        entry.num_reads += 1

    def end_read(self, key: ImportKey, num_copies: int) -> None:
        """That read has settled with so many copies in place: all of its own, or 0 if it failed.

        Frees the blocks when the import was given up and this was its last read.
        """
        entry = self._imports[key]
        entry.num_reads -= 1
        entry.num_unread -= num_copies
        assert entry.num_reads >= 0 and entry.num_unread >= 0, f"import {key} read too much"
        if entry.state is ImportState.ABORTING and entry.num_reads == 0:
            self._end(entry)
            self._pool.settle(entry.fresh)

    def is_reading(self, key: ImportKey) -> bool:
        """Whether blocks of it have been announced and not all of them are in place."""
        entry = self._imports.get(key)
        return entry is not None and entry.state is ImportState.PULLING and entry.num_unread > 0

    def begin_release(self, key: ImportKey) -> None:
        """Everything is read: prefill is about to be asked whether the lease held."""
        entry = self._imports[key]
        assert entry.state is not ImportState.ABORTING, f"import {key} was given up"
        is_complete = entry.is_fully_announced and entry.num_unread == entry.num_reads == 0
        assert is_complete, f"import {key} is incomplete"
        entry.state = ImportState.RELEASING

    def commit(self, key: ImportKey, lease_held: bool) -> Import | None:
        """Takes prefill's answer: the import, whose blocks are the caller's from now on.

        None when the lease did not hold: what was read may be anything, and is given up.
        """
        entry = self._imports[key]
        assert entry.state is ImportState.RELEASING, f"import {key} was not released"
        if not lease_held:
            self.abort(key)
            return None
        self._end(entry, entry.next_sequence)
        return entry

    def abort(self, key: ImportKey) -> None:
        """Gives it up; idempotent, and nothing for an unknown key."""
        entry = self._imports.get(key)
        if entry is None or entry.state is ImportState.ABORTING:
            return
        self._pool.release([*entry.held, *entry.spare])
        if entry.num_reads == 0:
            self._end(entry)
            self._pool.release(entry.fresh)
            return
        entry.state = ImportState.ABORTING
        self._pool.quarantine(entry.fresh)

    def reap(self) -> list[ImportKey]:
        """Gives up every import from whose prefill nothing was heard in time; returns them."""
        now = self._clock()
        silent = [
            entry.key
            for entry in self._imports.values()
            if entry.state is not ImportState.ABORTING and now > entry.expires_at
        ]
        for key in silent:
            self.abort(key)
        return silent

    def _end(self, entry: Import, num_announcements: int = 0) -> None:
        del self._imports[entry.key]
        now = self._clock()
        while self._ended and next(iter(self._ended.values())).forget_at < now:
            del self._ended[next(iter(self._ended))]
        self._ended[entry.key] = _End(num_announcements, now + self._timeout_s)
