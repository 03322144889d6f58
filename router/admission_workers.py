"""One worker as admission sees it, and the requests of this router that count there.

A load report knows of everybody's requests but not of those just sent; the router knows its
own at once. So a prefill worker's backlog is the router's own tokens plus what the last report
had above them, and decode's room is what the last report had free, less what has been sent
there and was not yet taken up when it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import types_pb2
from router.admission_model import SpeedMeter


@dataclass(eq=False, slots=True)
class PrefillState:
    """One prefill worker as this router sees it."""

    own_tokens: int = 0
    own_uncached: int = 0
    """Part of them: what the worker has to compute, and reports."""
    num_own: int = 0
    foreign_tokens: int = 0
    """Of other routers, by the last report."""
    window_at: float = 0.0
    """Begin of the span that the next first token is measured over."""
    speed: SpeedMeter = field(default_factory=SpeedMeter)

    @property
    def tokens(self) -> int:
        return self.own_tokens + self.foreign_tokens

    def add(self, item: InFlight, sign: int = 1) -> None:
        self.own_tokens += sign * item.num_tokens
        self.own_uncached += sign * item.num_uncached
        self.num_own += sign


@dataclass(eq=False, slots=True)
class DecodeState:
    """One decode worker as this router sees it."""

    reported_at: float | None = None
    total_blocks: int = 0
    free_blocks: int = 0
    """Free or cached, by the last report; so are the next three."""
    num_running: int = 0
    num_waiting: int = 0
    is_busy: bool = False
    unreported: set[InFlight] = field(default_factory=set)
    """Requests whose blocks the last report does not know."""
    unreported_blocks: int = 0
    num_reported: int = 0
    growth_blocks: int = 0
    """Half of what the reported ones are expected to grow: they are in mid-growth."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, as far as is known."""
        return not (self.is_busy or self.unreported or self.num_reported)

    def room(self, need_blocks: int) -> int:
        """Blocks for new requests of `need_blocks`.

        Who waits there already, but for those just sent, is taken to need as much. Decode
        keeps a block free for each sequence's growth before it takes in another.
        """
        taken = self.unreported_blocks + self.growth_blocks + self.num_running + 1
        num_waiting = max(0, self.num_waiting - len(self.unreported))
        return self.free_blocks - taken - num_waiting * need_blocks

    def report(self, load: types_pb2.Load, now: float) -> None:
        self.reported_at = now
        blocks = load.blocks
        self.total_blocks, self.free_blocks = blocks.total, blocks.free + blocks.cached
        self.num_running, self.num_waiting = load.running, load.queue_depth
        self.is_busy = bool(load.running or load.queue_depth or load.imports)
        for item in [item for item in self.unreported if item.is_prefilled]:
            self.unreported.discard(item)
            self.unreported_blocks -= item.need_blocks
            self.num_reported += 1
            self.growth_blocks += item.growth_blocks // 2

    def add(self, item: InFlight) -> None:
        self.unreported.add(item)
        self.unreported_blocks += item.need_blocks

    def remove(self, item: InFlight) -> None:
        if item in self.unreported:
            self.unreported.discard(item)
            self.unreported_blocks -= item.need_blocks
        else:
            self.num_reported -= 1
            self.growth_blocks -= item.growth_blocks // 2


@dataclass(eq=False, slots=True)
class InFlight:
    """One admitted request between its release and its end. Blocks are counted on decode."""

    num_tokens: int
    need_blocks: int
    growth_blocks: int
    """Part of them: of the output that is expected."""
    num_uncached: int = 0
    """Tokens of the prompt to compute, by what the router knew when it was placed."""
    prefill: PrefillState | None = None
    decode: DecodeState | None = None
    is_prefilled: bool = False
    prefilled_at: float = 0.0
