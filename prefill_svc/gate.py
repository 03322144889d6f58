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

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._waiting.values())

    @property
    def num_waiting_tokens(self) -> int:
        return sum(ticket.num_tokens for line in self._waiting.values() for ticket in line)

    async def enter(self, ticket: Ticket) -> None:
        """Waits for its turn. Pair with `leave`, also when this is cancelled."""
        self._waiting.setdefault(ticket.decode_worker, deque()).append(ticket)
        self.update()
        await ticket.entered.wait()

    def leave(self, ticket: Ticket) -> None:
        """The request is being computed, or is over. Idempotent."""
        line = self._waiting.get(ticket.decode_worker)
        if line is not None and ticket in line:
            line.remove(ticket)
        self._inside.discard(ticket)
        self.update()

    def update(self) -> None:
        """Lets in whoever fits now; called whenever room may have become free."""
        for worker in list(self._waiting):
            line = self._waiting[worker]
            while line and self._fits(line[0]):
                ticket = line.popleft()
                self._inside.add(ticket)
                ticket.entered.set()
            if not line:
                del self._waiting[worker]

    def _fits(self, ticket: Ticket) -> bool:
        ahead = [other for other in self._inside if other.decode_worker == ticket.decode_worker]
        tokens = sum(other.num_tokens for other in ahead)
        if ahead and tokens + ticket.num_tokens > self._max_tokens_ahead:
            return False
        pinned = self._num_pinned() + sum(other.num_blocks for other in self._inside)
        return pinned == 0 or pinned + ticket.num_blocks <= self._max_pinned_blocks
