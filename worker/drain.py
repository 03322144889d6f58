"""How a worker leaves without losing anything: no new work, and what there is comes to its end.

Prefill waits until decode has read what it exports; decode generates on, and what it cannot
finish in time it gives back to the routers, which go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging

from core.logs import event
from worker.host import WorkerHost

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_HAND_OVER_S = 5.0
"""Before the end of the grace, unless that is most of it."""
_LINGER_S = 0.3
"""What decode says of the last hand-off reaches the router before prefill's stream ends, which
would look like a loss."""


async def drain(host: WorkerHost, grace_s: float) -> None:
    """Returns when nothing is left to do, or after `grace_s`; at once with 0."""
    if grace_s <= 0:
        return
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    hand_over_at = began_at + grace_s - min(_HAND_OVER_S, grace_s / 2)
    has_handed_over = False
    await host.begin_draining()
    while is_busy(host) and (now := loop.time()) < began_at + grace_s:
        if now >= hand_over_at and not has_handed_over:
            has_handed_over = True
            host.service.hand_over()
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(_LINGER_S)
    event(
        logger,
        logging.INFO,
        "drained",
        duration_s=round(loop.time() - began_at, 2),
        num_requests_left=host.load().requests,
    )


def is_busy(host: WorkerHost) -> bool:
    """Whether anybody still needs this worker."""
    load = host.load()
    return bool(load.requests or load.exports or load.imports)
