"""Admission: who is let through to the workers, when, and who is told to come back later.

    quota → forecast of the first token → straight through, or the fair queue → workers

A request goes when a prefill worker is near the end of its work and a decode worker has room
for it; until then it waits here, where order and fairness are decided, and not pinned on a
worker. One that is predicted to miss its class's limit or its own deadline is refused at once.
While nothing is in flight, the next goes whatever the figures say.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Literal

from baton.v1 import types_pb2
from core.errors import ResourceExhausted
from router.admission_ledger import InFlight, Ledger, Workers
from router.admission_model import Backlog, Forecast, Margin, OutputMeter, forecast
from router.admission_queue import FairQueue, Waiting
from router.admission_refusals import AdmissionCounters, Demand, Refusals
from router.demand import RefusedWork, Totals, Work
from router.quotas import Charge, Quotas
from router.tenants import ClassName, Tenant
from router.workers import WorkerPool

_RECHECK_S = 0.25
_UNKNOWN_BLOCK_SIZE = 16
_MAX_PATIENCE_S = 10.0
"""A refused request counts as if it had waited for so long at most."""


@dataclass(frozen=True)
class AdmissionConfig:
    """`max_queued`: requests of one tenant that may wait."""

    max_queued: int
    prefill_ahead_s: float
    load_max_age_s: float


@dataclass(eq=False)
class _Queued(Waiting):
    item: InFlight = field(kw_only=True)
    turn: asyncio.Future[None] = field(kw_only=True)
    is_released: bool = False
    is_removed: bool = False


class Ticket:
    """An admitted request's place among those in flight, over all its attempts. `close` it."""

    def __init__(self, admission: Admission, demand: Demand, item: InFlight) -> None:
        self._admission = admission
        self._demand = demand
        self._item = item
        self._admitted_at = admission.clock()
        self.waited: tuple[Forecast, float] | None = None
        """What was expected when it began to wait, and when that was."""

    def placed(self, prefill_id: str | None, decode_id: str, num_uncached: int) -> None:
        """An attempt goes to these workers; without prefill, decode does both. `num_uncached`
        tokens of its prompt are to be computed."""
        workers = Workers(prefill_id, decode_id)
        self._admission.ledger.placed(self._item, workers, num_uncached, self._admission.clock())
        self._admission.pump()

    def prefilled(self) -> None:
        """The attempt's first token is there."""
        now = self._admission.clock()
        self._admission.ledger.prefilled(self._item, now)
        if self.waited is not None:
            expected, queued_at = self.waited
            margin = self._admission.margins[self._demand.tenant.class_name]
            margin.observe(expected.ttft_s, now - queued_at)
            self.waited = None
        self._admission.pump()

    def close(self, num_output_tokens: int) -> None:
        """The request is over, whatever the reason, with so many tokens of output."""
        self._admission.ended(self._item, self._demand, num_output_tokens)


class Admission:
    """One router's. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        config: AdmissionConfig,
        pool: WorkerPool,
        quotas: Quotas,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.ledger = Ledger(config.prefill_ahead_s, config.load_max_age_s)
        self.margins: defaultdict[ClassName, Margin] = defaultdict(Margin)
        self.counters = AdmissionCounters()
        self._refused = RefusedWork()
        self._refusals = Refusals(self.counters, rng)
        self._config = config
        self._pool = pool
        self._quotas = quotas
        self._queue = FairQueue()
        self._outputs = OutputMeter()
        self._has_waiting = asyncio.Event()
        self._waits_for: Literal["prefill", "decode"] = "prefill"

    def queued(self) -> dict[ClassName, tuple[int, int]]:
        """Requests and tokens that wait, by class."""
        return self._queue.counts()

    @property
    def num_waiting_for_prefill(self) -> int:
        """Requests that wait because the prefill workers have enough to do."""
        return self._queue.num_waiting if self._waits_for == "prefill" else 0

    @property
    def num_waiting_for_decode(self) -> int:
        """Requests that wait because no decode worker has room: decode's demand."""
        return self._queue.num_waiting if self._waits_for == "decode" else 0

    def demand(self, has_decode: bool) -> Totals:
        """What waits here for the workers, or was refused lately. Without decode workers, who
        would be on the way to prefill waits for them."""
        role = types_pb2.ROLE_PREFILL if self._waits_for == "prefill" else types_pb2.ROLE_DECODE
        queue, ledger = self._queue, self.ledger
        line = Work(queue.num_waiting, queue.num_prompt_tokens, queue.need_blocks)
        unplaced_role = types_pb2.ROLE_PREFILL if has_decode else types_pb2.ROLE_DECODE
        refused = self._refused.totals(ledger.pace(), self.clock())
        return line.waits_for(role) + ledger.unplaced().waits_for(unplaced_role) + refused

    async def run(self) -> None:
        """Looks again while requests wait, since reports become too old to go by; until
        cancelled."""
        while True:
            await self._has_waiting.wait()
            await asyncio.sleep(_RECHECK_S)
            self.pump()

    def quota(
        self, tenant: Tenant, request_id: str, num_tokens: int
    ) -> AbstractAsyncContextManager[Charge]:
        """Counts a request against its tenant's quotas, whoever answers it, as long as it lasts.

        Raises ResourceExhausted. `num_tokens` are expected; no two requests have the same id.
        """
        if not tenant.quota.is_limited:
            return nullcontext(Charge(tenant, request_id, num_tokens))
        return self._limited(tenant, request_id, num_tokens)

    @asynccontextmanager
    async def _limited(
        self, tenant: Tenant, request_id: str, num_tokens: int
    ) -> AsyncIterator[Charge]:
        async with AsyncExitStack() as stack:
            try:
                charge = await stack.enter_async_context(
                    self._quotas.hold(tenant, request_id, num_tokens)
                )
            except ResourceExhausted as refusal:
                self._refusals.over_quota(refusal)
                raise
            yield charge

    def expected_outputs(self, demand: Demand) -> int:
        """Tokens of all its choices."""
        return demand.num_choices * self._outputs.expected(demand.max_tokens)

    async def admit(self, demand: Demand) -> Ticket:
        """Returns when the request may go to the workers. Raises ResourceExhausted."""
        num_outputs = self.expected_outputs(demand)
        try:
            ticket = self._enter(demand, num_outputs)
            if ticket is None:
                ticket = await self._wait(demand, num_outputs)
        except ResourceExhausted:
            self._note_refused(demand, num_outputs)
            raise
        self.counters.num_admitted += 1
        return ticket

    def pump(self) -> None:
        """Lets in whoever may go now; called whenever that may have changed."""
        queue = self._queue
        while (head := queue.head()) is not None:
            assert isinstance(head, _Queued)
            if head.turn.cancelled():
                # Its task takes itself out a turn of the event loop later.
                queue.remove(head)
                head.is_removed = True
                continue
            if not self._may_go(head.need_blocks):
                break
            queue.pop()
            head.is_released = True
            self.ledger.released(head.item)
            head.turn.set_result(None)
        if head is None:
            self._has_waiting.clear()

    def ended(self, item: InFlight, demand: Demand, num_output_tokens: int) -> None:
        """A ticket is closed."""
        self.ledger.ended(item, self.clock())
        if num_output_tokens:
            self._outputs.add(num_output_tokens // demand.num_choices)
        self.pump()

    # WorkerObserver

    def on_workers(self) -> None:
        roles = (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE)
        prefills, decodes = ([link.worker_id for link in self._pool.usable(r)] for r in roles)
        self.ledger.set_workers(prefills, decodes)
        self.pump()

    def on_load(self, worker_id: str, load: types_pb2.Load) -> None:
        self.ledger.reported(worker_id, load, self.clock())
        self.pump()

    # The way in

    def _enter(self, demand: Demand, num_outputs: int) -> Ticket | None:
        """Straight through; None when it has to wait. Raises ResourceExhausted."""
        item = self._in_flight(demand, num_outputs)
        may_go = not self._queue.num_waiting and self._may_go(item.need_blocks)
        if self.ledger.num_inflight or self._queue.num_waiting:
            expected = self._expect(demand, item, has_room=may_go)
            if expected is not None:
                margin = self.margins[demand.tenant.class_name].value
                self._refusals.check_in_time(demand, expected, margin)
        if not may_go:
            return None
        self.ledger.released(item)
        return Ticket(self, demand, item)

    async def _wait(self, demand: Demand, num_outputs: int) -> Ticket:
        item = self._in_flight(demand, num_outputs)
        tenant = demand.tenant
        if self._queue.num_waiting_of(tenant) >= self._config.max_queued:
            raise self._refusals.full(tenant, self._config.max_queued)
        waiting = _Queued(
            tenant=tenant,
            cost=demand.num_prompt_tokens + num_outputs,
            num_prompt_tokens=demand.num_prompt_tokens,
            need_blocks=item.need_blocks,
            priority=demand.priority,
            item=item,
            turn=asyncio.get_running_loop().create_future(),
        )
        ticket = Ticket(self, demand, item)
        expected = self._expect(demand, item, has_room=False)
        if expected is not None:
            ticket.waited = (expected, self.clock())
        self._queue.push(waiting)
        self._has_waiting.set()
        self.counters.num_queued += 1
        try:
            async with asyncio.timeout(_patience_s(tenant)):
                await waiting.turn
        except BaseException as error:
            if waiting.is_released:
                self.ledger.ended(item, self.clock())
            elif not waiting.is_removed:
                self._queue.remove(waiting)
            self.pump()
            if isinstance(error, TimeoutError):
                raise self._refusals.overtaken(tenant) from None
            raise
        return ticket

    def _may_go(self, need_blocks: int) -> bool:
        if self.ledger.num_inflight == 0:
            return True
        if not self.ledger.has_prefill_turn():
            self._waits_for = "prefill"
            return False
        if not self.ledger.has_room(need_blocks, self.clock()):
            self._waits_for = "decode"
            return False
        return True

    def _in_flight(self, demand: Demand, num_outputs: int) -> InFlight:
        fingerprint = self._pool.fingerprint
        block_size = fingerprint.block_size if fingerprint is not None else _UNKNOWN_BLOCK_SIZE
        num_outputs = min(num_outputs, self.ledger.max_growth(demand.num_choices) * block_size)
        return InFlight(
            num_tokens=demand.num_prompt_tokens,
            need_blocks=-(-(demand.num_prompt_tokens + num_outputs) // block_size),
            growth_blocks=num_outputs // block_size,
        )

    def _expect(self, demand: Demand, item: InFlight, has_room: bool) -> Forecast | None:
        """When its first token comes if it is let in; None while nothing is measured."""
        ledger, queue = self.ledger, self._queue
        if not ledger.is_measured:
            return None
        cost = demand.num_prompt_tokens
        part = queue.work_ahead(demand.tenant, demand.priority, cost)
        blocks_short, blocks_per_s = 0.0, None
        if not has_room:
            blocks_per_s = ledger.blocks_per_s()
            need_blocks = item.need_blocks + part * queue.need_blocks
            blocks_short = ledger.blocks_short(need_blocks, self.clock())
        backlog = Backlog(
            tokens_ahead=ledger.prefill_tokens + part * queue.num_prompt_tokens,
            tokens_per_s=ledger.tokens_per_s,
            num_prefill=ledger.num_prefill,
            blocks_short=blocks_short,
            blocks_per_s=blocks_per_s or math.inf,
        )
        return forecast(backlog, item.num_tokens)

    def _note_refused(self, demand: Demand, num_outputs: int) -> None:
        need_blocks = self._in_flight(demand, num_outputs).need_blocks
        work = Work(1, demand.num_prompt_tokens, need_blocks)
        limit_s = demand.tenant.service_class.ttft_limit_s or math.inf
        patience_s = min(limit_s, demand.time_left_s, _MAX_PATIENCE_S)
        self._refused.note(work, patience_s, self.clock())


def _patience_s(tenant: Tenant) -> float | None:
    """How long a request may wait; None: until its deadline.

    Classes with a share get their turn. One without goes only when no other waits, so that a
    request which was let in while it could be served may be overtaken for ever.
    """
    service = tenant.service_class
    return None if service.share else service.ttft_limit_s
