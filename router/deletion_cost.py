"""Which worker pod goes first when its Deployment shrinks: the one with least work.

A worker's id is the name of its pod. Costs are coarse, so that few are written, and several
routers write the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.logs import event
from router.workers import WorkerPool

logger = logging.getLogger(__name__)

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INTERVAL_S = 5.0


def pod_namespace(file: Path = _NAMESPACE_FILE) -> str | None:
    """Where this process runs in a cluster and may call its API; None elsewhere."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or not file.is_file():
        return None
    return file.read_text().strip()


def deletion_cost(load: types_pb2.Load) -> int:
    """0 for an idle worker, and one more each time that its requests double."""
    return (load.requests + load.exports).bit_length()


class DeletionCosts:
    """`write(pod, cost)` raises Unavailable. `run` until cancelled."""

    def __init__(self, pool: WorkerPool, write: Callable[[str, int], Awaitable[None]]) -> None:
        self._pool = pool
        self._write = write
        self._written: dict[str, int] = {}
        self._was_ok = True

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(_INTERVAL_S)

    async def update(self) -> None:
        """Writes what has changed."""
        costs = {
            link.worker_id: deletion_cost(link.load)
            for link in self._pool.links
            if link.load is not None
        }
        self._written = {pod: cost for pod, cost in self._written.items() if pod in costs}
        for pod, cost in costs.items():
            if self._written.get(pod) == cost:
                continue
            try:
                await self._write(pod, cost)
            except Unavailable as error:
                if self._was_ok:
                    event(logger, logging.WARNING, "deletion_cost_not_written", error=error.message)
                self._was_ok = False
            else:
                self._written[pod] = cost
                self._was_ok = True


async def keep_deletion_costs(pool: WorkerPool, namespace: str) -> None:
    """Has the cluster told of the workers of `pool`, which are pods of `namespace`; until
    cancelled. Raises StartupError outside a cluster."""
    # Only here, since it takes a third of a second to import.
    from router.kubernetes_client import connect, write_deletion_cost

    api = await asyncio.to_thread(connect)

    async def write(pod: str, cost: int) -> None:
        await asyncio.to_thread(write_deletion_cost, api, namespace, pod, cost)

    await DeletionCosts(pool, write).run()
