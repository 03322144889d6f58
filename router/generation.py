"""What every request of a router shares."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from core.tokenizer import Tokenizer
from core.tracing import Tracer
from router.admission import Admission
from router.breaker import Breaker
from router.fallback import Fallback
from router.metrics import RouterMetrics
from router.placement import Placer
from router.tenant_file import TenantBook
from router.validate import ModelLimits


class StreamIds:
    """Numbers for sequences, under which workers send their tokens; none comes twice."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> int:
        """The first of `count` consecutive new ones."""
        first, self._next = self._next, self._next + count
        return first


@dataclass(frozen=True)
class Generation:
    """What every request of this router shares."""

    router_id: str
    tokenizer: Tokenizer
    limits: ModelLimits
    """With the model's own context length; the pool may know a shorter one."""
    placer: Placer
    tenants: TenantBook
    admission: Admission
    breaker: Breaker
    fallback: Fallback
    worker_wait_s: float
    """How long a request waits in all while no worker of a role is ready."""
    rng: random.Random
    metrics: RouterMetrics
    tracer: Tracer
    stream_ids: StreamIds = field(default_factory=StreamIds)

    def current_limits(self) -> ModelLimits:
        """The model's limits or, if less, what the attached workers can hold."""
        pool_len = self.placer.pool.max_model_len
        if pool_len is None or pool_len >= self.limits.max_model_len:
            return self.limits
        return replace(self.limits, max_model_len=pool_len)
