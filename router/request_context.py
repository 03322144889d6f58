"""What accompanies one request on its whole way through the router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from core.tracing import Span
from router.tenants import Tenant


@dataclass(frozen=True)
class RequestContext:
    """Whose request it is, what workers call it, and how long it may take."""

    worker_request_id: str
    """Unique in the life of the whole deployment, unlike the client's id: workers must not
    confuse two requests."""
    deadline: float
    """In the event loop's time."""
    tenant: Tenant
    span: Span

    def time_left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()
