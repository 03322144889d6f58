"""The owner's side of a transfer: which blocks are pinned for whom, and until when.

    PINNED → ANNOUNCED → RELEASED | EXPIRED | REVOKED

A hand-off begins PINNED, since prefill still computes what it pins. Cached blocks that another
worker fetches are final: they are lent, which is ANNOUNCED from the start.

Plain bookkeeping: no I/O, no clock of its own; blocks are numbers. An export owns one
reference of every block that it pins, from the moment the scheduler allocates them until one
of the three ends. A one-sided read leaves no trace at its source, so the lease is what makes
a read trustworthy: the reader asks `release` after reading, and only True says that the blocks
were pinned all the while.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core.tracing import END_REASON, NO_SPAN, Span

ExportKey = tuple[str, int]
"""(request_id, attempt)."""


class ExportState(enum.Enum):
    PINNED = "pinned"
    """Prefill still computes; the prefill request owns the export."""
    ANNOUNCED = "announced"
    """Decode knows every block; the lease runs."""
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass
class Export:
    key: ExportKey
    block_ids: list[int] = field(default_factory=list)
    state: ExportState = ExportState.PINNED
    expires_at: float = 0.0
    cap_at: float = 0.0
    """No renewal carries the lease beyond this time."""
    is_lent: bool = False
    """Of the prefix cache, and not of a hand-off."""
    span: Span = NO_SPAN
    """Of its life."""


@dataclass(frozen=True)
class LeaseConfig:
    lease_s: float = 10.0
    """Life of an announced export without a renewal."""
    max_lease_s: float = 60.0
    """Life of an announced export with renewals."""
    pin_s: float = 600.0
    """Life of an export whose prefill makes no progress at all."""


class ExportTable:
    """Every export of one worker."""

    def __init__(
        self,
        config: LeaseConfig,
        clock: Callable[[], float],
        acquire: Callable[[Iterable[int]], None],
        release: Callable[[Iterable[int]], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._acquire = acquire
        self._release = release
        self._exports: dict[ExportKey, Export] = {}
        self._ended: dict[ExportKey, tuple[bool, float]] = {}
        """Answer of `release` for ended exports, and when it may be forgotten."""

    @property
    def num_open(self) -> int:
        return len(self._exports)

    @property
    def num_pinned_blocks(self) -> int:
        """References on blocks that open exports hold."""
        return sum(len(export.block_ids) for export in self._exports.values())

    @property
    def num_lent_blocks(self) -> int:
        """Those of them that are not of hand-offs."""
        lent = (export for export in self._exports.values() if export.is_lent)
        return sum(len(export.block_ids) for export in lent)

    def is_known(self, key: ExportKey) -> bool:
        """Whether such an export is open, or was not long ago."""
        return key in self._exports or key in self._ended

    def open(self, key: ExportKey, span: Span = NO_SPAN) -> None:
        """Begins an export, whose end ends `span`. The key must be new."""
        assert not self.is_known(key), f"export {key} opened twice"
        expires_at = self._clock() + self._config.pin_s
        self._exports[key] = Export(key, expires_at=expires_at, span=span)

    def pin(self, key: ExportKey, block_ids: list[int]) -> None:
        """Takes a reference of each block; once per export. Ignored when it has ended."""
        export = self._exports.get(key)
        if export is None or export.block_ids:
            return
        self._acquire(block_ids)
        export.block_ids = list(block_ids)
        export.expires_at = self._clock() + self._config.pin_s

    def announced(self, key: ExportKey) -> bool:
        """All blocks are announced: the lease begins. False when the export has ended."""
        export = self._exports.get(key)
        if export is None or export.state is not ExportState.PINNED:
            return False
        now = self._clock()
        export.state = ExportState.ANNOUNCED
        export.span.event("announced")
        export.expires_at = now + self._config.lease_s
        export.cap_at = now + self._config.max_lease_s
        return True

    def lend(self, key: ExportKey, block_ids: list[int]) -> None:
        """Begins an export of final blocks: its lease runs from now. The key must be new."""
        self.open(key)
        self.pin(key, block_ids)
        self.announced(key)
        self._exports[key].is_lent = True

    def trusted_blocks(self, key: ExportKey) -> list[int]:
        """The blocks of an export whose lease holds; empty for any other."""
        export = self._exports.get(key)
        if export is None or self._clock() > export.expires_at:
            return []
        return export.block_ids

    def renew(self, key: ExportKey) -> bool:
        """Prolongs the lease up to its cap. False when it does not hold (any more)."""
        export = self._exports.get(key)
        now = self._clock()
        if export is None or now > export.expires_at:
            return False
        if export.state is ExportState.ANNOUNCED:
            export.expires_at = min(now + self._config.lease_s, export.cap_at)
        return True

    def release(self, key: ExportKey) -> bool:
        """The reader is done with it. True only when the lease held without a gap until now.

        Repeating the question repeats the answer. A release before everything was announced
        is decode giving up: the export is revoked and the answer is False.
        """
        export = self._exports.get(key)
        if export is None:
            held, _ = self._ended.get(key, (False, 0.0))
            return held
        if export.state is not ExportState.ANNOUNCED:
            self._end(export, ExportState.REVOKED)
            return False
        if self._clock() > export.expires_at:
            self._end(export, ExportState.EXPIRED)
            return False
        self._end(export, ExportState.RELEASED)
        return True

    def revoke(self, key: ExportKey) -> bool:
        """Prefill takes it back (cancel, failure, or nothing to hand off). False: unknown."""
        export = self._exports.get(key)
        if export is None:
            return False
        self._end(export, ExportState.REVOKED)
        return True

    def reap(self) -> list[Export]:
        """Ends every export whose time is over and returns them."""
        now = self._clock()
        expired = [export for export in self._exports.values() if now > export.expires_at]
        for export in expired:
            self._end(export, ExportState.EXPIRED)
        self._ended = {key: end for key, end in self._ended.items() if end[1] >= now}
        return expired

    def _end(self, export: Export, state: ExportState) -> None:
        del self._exports[export.key]
        export.state = state
        export.span.set({"baton.blocks": len(export.block_ids), END_REASON: state.value})
        export.span.end()
        self._release(export.block_ids)
        forget_at = self._clock() + self._config.max_lease_s
        self._ended[export.key] = (state is ExportState.RELEASED, forget_at)
