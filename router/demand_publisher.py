"""Publishes every second what this router adds to the demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.logs import event
from router.admission import Admission
from router.demand import Totals
from router.demand_board import DemandBoard
from router.workers import WorkerPool

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


@dataclass(frozen=True)
class RouterIdentity:
    """Who publishes: `model` is the served name, `model_digest` None as long as no worker has
    told it."""

    router_id: str
    release: str
    model: str
    model_digest: str | None


class DemandPublisher:
    """One router's. `run` until cancelled."""

    def __init__(
        self, board: DemandBoard, identity: RouterIdentity, admission: Admission, pool: WorkerPool
    ) -> None:
        self._board = board
        self._identity = identity
        self._admission = admission
        self._pool = pool

    def own(self) -> Totals:
        """What this router knows and no worker: who waits here, and who was refused."""
        return self._admission.demand(has_decode=self._usable(types_pb2.ROLE_DECODE) > 0)

    def record(self) -> types_pb2.RouterDemand | None:
        """This router's entry on the board; None as long as it cannot tell whose workers are its.

        Their demand would be missing from the sum.
        """
        identity, own = self._identity, self.own()
        fingerprint = self._pool.fingerprint
        digest = identity.model_digest or (fingerprint.model if fingerprint else "")
        if not digest:
            return None
        return types_pb2.RouterDemand(
            router_id=identity.router_id,
            release=identity.release,
            model=identity.model,
            model_digest=digest,
            prefill_prompts=own.prefill_prompts,
            prefill_queued_tokens=own.prefill_queued_tokens,
            decode_sequences=own.decode_sequences,
            decode_blocks=own.decode_blocks,
            num_prefill=self._usable(types_pb2.ROLE_PREFILL),
            num_decode=self._usable(types_pb2.ROLE_DECODE),
            reported_at_s=time.time(),
        )

    async def run(self) -> None:
        """Publishes until cancelled, and then takes the record away."""
        was_ok = True
        try:
            while True:
                try:
                    if (record := self.record()) is not None:
                        await self._board.publish(record)
                    was_ok = True
                except Unavailable as error:
                    if was_ok:
                        event(logger, logging.WARNING, "demand_not_published", error=error.message)
                    was_ok = False
                await asyncio.sleep(_INTERVAL_S)
        finally:
            with contextlib.suppress(Unavailable):
                await self._board.remove(self._identity.router_id)

    def _usable(self, role: types_pb2.Role.ValueType) -> int:
        return len(self._pool.usable(role))
