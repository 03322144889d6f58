"""Admission: who is let through to the workers, when, and who is told to come back later.

    quota → forecast of the first token → straight through, or a wait at the gate → workers

One that is predicted to miss its class's limit or its own deadline is refused at once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass

from baton.v1 import types_pb2
from core.errors import ResourceExhausted
from router.admission_forecast import Forecaster
from router.admission_gate import Gate, Queued
from router.admission_ledger import Ledger, Workers
from router.admission_model import Forecast
from router.admission_refusals import AdmissionCounters, Demand, Refusals
from router.admission_workers import InFlight
from router.demand import RefusedWork, Totals, Work
from router.quotas import Charge, Quotas
from router.tenants import Tenant
from router.workers import WorkerPool

_MAX_PATIENCE_S = 10.0
"""A refused request counts as if it had waited for so long at most."""


@dataclass(frozen=True)
class AdmissionConfig:
    """`max_queued`: requests of one tenant that may wait."""

    max_queued: int
    prefill_ahead_s: float
    load_max_age_s: float


class Ticket:
    """An admitted request's place among those in flight, over all its attempts. `close` it."""

    def __init__(self, admission: Admission, demand: Demand, item: InFlight) -> None:
        self._admission = admission
        self._demand = demand
        self._item = item
        self.waited: tuple[Forecast, float] | None = None
        """What was expected when it began to wait, and when that was."""

    def placed(self, prefill_id: str | None, decode_id: str, num_uncached: int) -> None:
        """An attempt goes to these workers; without prefill, decode does both. `num_uncached`
        tokens of its prompt are to be computed."""
        workers = Workers(prefill_id, decode_id)
        self._admission.ledger.placed(self._item, workers, num_uncached, self._admission.clock())
        self._admission.gate.pump()

    def prefilled(self) -> None:
        """The attempt's first token is there."""
        now = self._admission.clock()
        self._admission.ledger.prefilled(self._item, now)
        if self.waited is not None:
            expected, queued_at = self.waited
            margin = self._admission.forecaster.margins[self._demand.tenant.class_name]
            margin.observe(expected.ttft_s, now - queued_at)
            self.waited = None
        self._admission.gate.pump()

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
        self.gate = Gate(self.ledger, clock)
        self.forecaster = Forecaster(self.ledger, self.gate.queue, pool, clock)
        self.counters = AdmissionCounters()
        self._refused = RefusedWork()
        self._refusals = Refusals(self.counters, rng)
        self._config = config
        self._pool = pool
        self._quotas = quotas

    def demand(self, has_decode: bool) -> Totals:
        """What waits here for the workers, or was refused lately. Without decode workers, who
        would be on the way to prefill waits for them."""
        role = types_pb2.ROLE_PREFILL if self.gate.waits_for == "prefill" else types_pb2.ROLE_DECODE
        queue, ledger = self.gate.queue, self.ledger
        line = Work(queue.num_waiting, queue.num_prompt_tokens, queue.need_blocks)
        unplaced_role = types_pb2.ROLE_PREFILL if has_decode else types_pb2.ROLE_DECODE
        refused = self._refused.totals(ledger.pace(), self.clock())
        return line.waits_for(role) + ledger.unplaced().waits_for(unplaced_role) + refused

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

    async def admit(self, demand: Demand) -> Ticket:
        """Returns when the request may go to the workers. Raises ResourceExhausted."""
        num_outputs = self.forecaster.num_outputs(demand)
        try:
            ticket = self._enter(demand, num_outputs)
            if ticket is None:
                ticket = await self._wait(demand, num_outputs)
        except ResourceExhausted:
            self._note_refused(demand, num_outputs)
            raise
        self.counters.num_admitted += 1
        return ticket

    def ended(self, item: InFlight, demand: Demand, num_output_tokens: int) -> None:
        """A ticket is closed."""
        self.ledger.ended(item, self.clock())
        if num_output_tokens:
            self.forecaster.outputs.add(num_output_tokens // demand.num_choices)
        self.gate.pump()

    # WorkerObserver

    def on_workers(self) -> None:
        roles = (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE)
        prefills, decodes = ([link.worker_id for link in self._pool.usable(r)] for r in roles)
        self.ledger.set_workers(prefills, decodes)
        self.gate.pump()

    def on_load(self, worker_id: str, load: types_pb2.Load) -> None:
        self.ledger.reported(worker_id, load, self.clock())
        self.gate.pump()

    # The way in

    def _enter(self, demand: Demand, num_outputs: int) -> Ticket | None:
        """Straight through; None when it has to wait. Raises ResourceExhausted."""
        item = self.forecaster.in_flight(demand, num_outputs)
        may_go = self.gate.is_open(item.need_blocks)
        if self.ledger.num_inflight or self.gate.queue.num_waiting:
            expected = self.forecaster.first_token(demand, item, has_room=may_go)
            if expected is not None:
                margin = self.forecaster.margins[demand.tenant.class_name].value
                self._refusals.check_in_time(demand, expected, margin)
        if not may_go:
            return None
        self.ledger.released(item)
        return Ticket(self, demand, item)

    async def _wait(self, demand: Demand, num_outputs: int) -> Ticket:
        item = self.forecaster.in_flight(demand, num_outputs)
        tenant = demand.tenant
        if self.gate.queue.num_waiting_of(tenant) >= self._config.max_queued:
            raise self._refusals.full(tenant, self._config.max_queued)
        waiting = Queued(
            tenant=tenant,
            cost=demand.num_prompt_tokens + num_outputs,
            num_prompt_tokens=demand.num_prompt_tokens,
            need_blocks=item.need_blocks,
            priority=demand.priority,
            item=item,
        )
        ticket = Ticket(self, demand, item)
        expected = self.forecaster.first_token(demand, item, has_room=False)
        if expected is not None:
            ticket.waited = (expected, self.clock())
        self.counters.num_queued += 1
        try:
            await self.gate.wait(waiting, _patience_s(tenant))
        except TimeoutError:
            raise self._refusals.overtaken(tenant) from None
        return ticket

    def _note_refused(self, demand: Demand, num_outputs: int) -> None:
        need_blocks = self.forecaster.in_flight(demand, num_outputs).need_blocks
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
