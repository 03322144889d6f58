"""Who may ask decode for room now: first come, first served, for each decode worker apart.

A grant pins blocks on decode from then on, so prompts get one only shortly before their turn:
as many as the next steps will compute. And what is computed stays pinned here until decode
has read it, so exports take at most a share of the pool (one may always exceed it).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """One request's place in the line."""

    decode_worker: str
    num_tokens: int
    num_blocks: int
    arrival: int = 0
    """Order over all lines; the gate sets it."""
    entered: asyncio.Event = field(default_factory=asyncio.Event)


class Gate:
    """Lets requests in while little enough is granted and not yet computed."""

    def __init__(
        self, max_tokens_ahead: int, max_pinned_blocks: int, num_pinned: Callable[[], int]
    ) -> None:
        self._max_tokens_ahead = max_tokens_ahead
        self._max_pinned_blocks = max_pinned_blocks
        self._num_pinned = num_pinned
        self._waiting: dict[str, deque[Ticket]] = {}
        self._inside: set[Ticket] = set()
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    async def enter(self, ticket: Ticket) -> None:
        """Waits for its turn. Pair with `leave`, also when this is cancelled."""
        self._num_arrivals += 1
        ticket.arrival = self._num_arrivals
        self._waiting.setdefault(ticket.decode_worker, deque()).append(ticket)
        self.update()
        await ticket.entered.wait()

    def leave(self, ticket: Ticket) -> None:
        """The request is being computed, or is over. Idempotent."""
        if ticket in self._waiting.get(ticket.decode_worker, ()):
            self._remove(ticket)
        self._inside.discard(ticket)
        self.update()

    def update(self) -> None:
        """Lets in whoever fits now; called whenever room may have become free."""
        while (ticket := self._next()) is not None:
            self._remove(ticket)
            self._inside.add(ticket)
            ticket.entered.set()

    def _remove(self, ticket: Ticket) -> None:
        line = self._waiting[ticket.decode_worker]
        line.remove(ticket)
        if not line:
            del self._waiting[ticket.decode_worker]

    def _next(self) -> Ticket | None:
        """Who comes next: of the heads of all lines, the one that has waited longest.

        One that has to wait for its decode worker holds up only its own line; one that has to
        wait for pinned blocks, which all share, holds up all, or a large one would starve.
        """
        heads = sorted((line[0] for line in self._waiting.values()), key=lambda t: t.arrival)
        for ticket in heads:
            if self._is_near_its_turn(ticket):
                return ticket if self._has_room(ticket) else None
        return None

    def _is_near_its_turn(self, ticket: Ticket) -> bool:
        ahead = [other for other in self._inside if other.decode_worker == ticket.decode_worker]
        tokens = sum(other.num_tokens for other in ahead)
        return not ahead or tokens + ticket.num_tokens <= self._max_tokens_ahead

    def _has_room(self, ticket: Ticket) -> bool:
        pinned = self._num_pinned() + sum(other.num_blocks for other in self._inside)
        return pinned == 0 or pinned + ticket.num_blocks <= self._max_pinned_blocks
