"""The gate before the workers: who waits at it, and the rule by which the next goes through.

    in line → released to the workers, or out of line: given up, overtaken for too long

A request goes when a prefill worker is near the end of its work and a decode worker has room
for it; until then it waits here, where order and fairness are decided, and not pinned on a
worker. While nothing is in flight, the next goes whatever the figures say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from router.admission_ledger import Ledger
from router.admission_queue import FairQueue, Waiting
from router.admission_workers import InFlight

_RECHECK_S = 0.25


@dataclass(eq=False)
class Queued(Waiting):
    """One that waits at the gate. `item` is how it will count once it is released."""

    item: InFlight = field(kw_only=True)
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_released: bool = False
    is_removed: bool = False


class Gate:
    """Opens as the `ledger` says. `clock` is monotonic, in seconds."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.queue = FairQueue()
        self.waits_for: Literal["prefill", "decode"] = "prefill"
        """Which role's workers have no room for the next, if any waits."""
        self._ledger = ledger
        self._clock = clock
        self._has_waiting = asyncio.Event()

    @property
    def num_waiting_for_prefill(self) -> int:
        """Requests that wait because the prefill workers have enough to do."""
        return self.queue.num_waiting if self.waits_for == "prefill" else 0

    @property
    def num_waiting_for_decode(self) -> int:
        """Requests that wait because no decode worker has room: decode's demand."""
        return self.queue.num_waiting if self.waits_for == "decode" else 0

    def is_open(self, need_blocks: int) -> bool:
        """Whether a newcomer goes straight through."""
        return not self.queue.num_waiting and self._may_go(need_blocks)

    async def wait(self, waiting: Queued, patience_s: float | None) -> None:
        """Returns when it is its turn; it counts as in flight then.

        Raises TimeoutError after `patience_s`; None: it waits for as long as it takes.
        """
        self.queue.push(waiting)
        self._has_waiting.set()
        try:
            async with asyncio.timeout(patience_s):
                await waiting.turn
        except BaseException:
            if waiting.is_released:
                self._ledger.ended(waiting.item, self._clock())
            elif not waiting.is_removed:
                self.queue.remove(waiting)
            self.pump()
            raise

    def pump(self) -> None:
        """Lets in whoever may go now; called whenever that may have changed."""
        queue = self.queue
        while (head := queue.head()) is not None:
            assert isinstance(head, Queued)
            if head.turn.cancelled():
                # Its task takes itself out a turn of the event loop later.
                queue.remove(head)
                head.is_removed = True
                continue
            if not self._may_go(head.need_blocks):
                break
            queue.pop()
            head.is_released = True
            self._ledger.released(head.item)
            head.turn.set_result(None)
        if head is None:
            self._has_waiting.clear()

    async def run(self) -> None:
        """Looks again while requests wait, since reports become too old to go by; until
        cancelled."""
        while True:
            await self._has_waiting.wait()
            await asyncio.sleep(_RECHECK_S)
            self.pump()

    def _may_go(self, need_blocks: int) -> bool:
        if self._ledger.num_inflight == 0:
            return True
        if not self._ledger.has_prefill_turn():
            self.waits_for = "prefill"
            return False
        if not self._ledger.has_room(need_blocks, self._clock()):
            self.waits_for = "decode"
            return False
        return True
