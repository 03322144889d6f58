"""What a request is expected to need, and when its first token: the model, applied to the ledger
and to the line at the gate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from router.admission_ledger import Ledger
from router.admission_model import Backlog, Forecast, Margin, OutputMeter, forecast
from router.admission_queue import FairQueue
from router.admission_refusals import Demand
from router.admission_workers import InFlight
from router.tenants import ClassName
from router.workers import WorkerPool

_UNKNOWN_BLOCK_SIZE = 16


class Forecaster:
    """Learns from requests that are over. `clock` is monotonic, in seconds."""

    def __init__(
        self, ledger: Ledger, queue: FairQueue, pool: WorkerPool, clock: Callable[[], float]
    ) -> None:
        self.outputs = OutputMeter()
        self.margins: defaultdict[ClassName, Margin] = defaultdict(Margin)
        self._ledger = ledger
        self._queue = queue
        self._pool = pool
        self._clock = clock

    def num_outputs(self, demand: Demand) -> int:
        """Tokens of all its choices."""
        return demand.num_choices * self.outputs.expected(demand.max_tokens)

    def in_flight(self, demand: Demand, num_outputs: int) -> InFlight:
        """How it will count in the ledger."""
        fingerprint = self._pool.fingerprint
        block_size = fingerprint.block_size if fingerprint is not None else _UNKNOWN_BLOCK_SIZE
        num_outputs = min(num_outputs, self._ledger.max_growth(demand.num_choices) * block_size)
        return InFlight(
            num_tokens=demand.num_prompt_tokens,
            need_blocks=-(-(demand.num_prompt_tokens + num_outputs) // block_size),
            growth_blocks=num_outputs // block_size,
        )

    def first_token(self, demand: Demand, item: InFlight, has_room: bool) -> Forecast | None:
        """When it comes if the request is let in; None while nothing is measured."""
        ledger, queue = self._ledger, self._queue
        if not ledger.is_measured:
            return None
        cost = demand.num_prompt_tokens
        part = queue.work_ahead(demand.tenant, demand.priority, cost)
        blocks_short, blocks_per_s = 0.0, None
        if not has_room:
            blocks_per_s = ledger.blocks_per_s()
            need_blocks = item.need_blocks + part * queue.need_blocks
            blocks_short = ledger.blocks_short(need_blocks, self._clock())
        backlog = Backlog(
            tokens_ahead=ledger.prefill_tokens + part * queue.num_prompt_tokens,
            tokens_per_s=ledger.tokens_per_s,
            num_prefill=ledger.num_prefill,
            blocks_short=blocks_short,
            blocks_per_s=blocks_per_s or math.inf,
        )
        return forecast(backlog, item.num_tokens)
