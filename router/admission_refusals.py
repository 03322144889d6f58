"""Which requests are told at once to come back later, and how many were."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from core.errors import ResourceExhausted
from router.admission_model import Forecast, excess_s
from router.tenants import Tenant

_FULL_RETRY_S = 1.0
_MIN_RETRY_S = 0.1


@dataclass(frozen=True)
class Demand:
    """What admission must know of a request. `max_tokens` is each choice's."""

    request_id: str
    tenant: Tenant
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    priority: int
    time_left_s: float


@dataclass
class AdmissionCounters:
    """Totals since the start of the router."""

    num_admitted: int = 0
    num_queued: int = 0
    """Of all that came, those that had to wait."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason: ttft, deadline, queue_full, requests_per_s, tokens_per_min, max_concurrent."""


class Refusals:
    """Counts each refusal, and spreads the time to come back by chance."""

    def __init__(self, counters: AdmissionCounters, rng: random.Random) -> None:
        self._counters = counters
        self._rng = rng

    def check_in_time(self, demand: Demand, expected: Forecast, margin: float) -> None:
        """Raises ResourceExhausted when the first token is expected too late."""
        service = demand.tenant.service_class
        when = f"the first token is expected in {expected.ttft_s:.2f} s"
        if service.ttft_limit_s is not None:
            late_s = excess_s(expected, margin, service.ttft_limit_s)
            if late_s > 0:
                limit = f"class {demand.tenant.class_name} waits {service.ttft_limit_s:g} s at most"
                raise self._refusal("ttft", f"{when}; {limit}", late_s)
        late_s = expected.ttft_s - demand.time_left_s
        if late_s > 0:
            deadline = f"the request's deadline is in {demand.time_left_s:.2f} s"
            raise self._refusal("deadline", f"{when}; {deadline}", late_s)

    def full(self, tenant: Tenant, max_queued: int) -> ResourceExhausted:
        """`max_queued` requests of `tenant` wait."""
        message = f"{max_queued} requests of tenant {tenant.name} wait already"
        return self._refusal("queue_full", message, _FULL_RETRY_S)

    def overtaken(self, tenant: Tenant) -> ResourceExhausted:
        """It has waited as long as its class waits at most, and others always went first."""
        limit_s = tenant.service_class.ttft_limit_s or 0.0
        message = f"others went first for {limit_s:g} s, which is all that its class waits"
        return self._refusal("ttft", message, limit_s)

    def over_quota(self, refusal: ResourceExhausted) -> None:
        """Counts a refusal of the quotas."""
        self._counters.refused[refusal.field] += 1

    def _refusal(self, reason: str, message: str, retry_after_s: float) -> ResourceExhausted:
        """Those refused together shall not come back together."""
        self._counters.refused[reason] += 1
        retry_after_s = max(_MIN_RETRY_S, retry_after_s) * self._rng.uniform(1.0, 1.5)
        return ResourceExhausted(message, retry_after_s=retry_after_s)
