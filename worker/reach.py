"""Whether a worker that starts gets through to those that it will exchange KV with.

A network policy, a certificate or a wrong address may keep pods apart that are all well by
themselves. A pod that finds out before it says that it is ready stops a rollout; one that finds
out later fails requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.v1 import types_pb2, worker_pb2
from core.errors import BatonError, Unavailable
from core.logs import event
from kvtransfer.peers import CONTROL_TIMEOUT_S
from worker.host import WorkerHost

logger = logging.getLogger(__name__)

RETRY_S = 0.5

ListWorkers = Callable[[], Awaitable[list[types_pb2.WorkerRecord]]]


async def reach_peers(host: WorkerHost, list_workers: ListWorkers) -> None:
    """Returns once one worker of the other role has answered, or when there is none to answer.

    Whom no worker hears from any more leaves the registry, and so is waited for no longer.
    """
    told: set[tuple[str, int]] = set()
    while True:
        try:
            peers = _peers(await list_workers(), host.record())
        except Unavailable as error:
            event(logger, logging.WARNING, "peers_unknown", error=error)
            return
        if not peers or await _any_answers(host, peers, told):
            return
        await asyncio.sleep(RETRY_S)


def _peers(
    records: list[types_pb2.WorkerRecord], own: types_pb2.WorkerRecord
) -> list[types_pb2.WorkerRecord]:
    """Those that may share a request with `own`."""
    return [
        record
        for record in records
        if record.role != own.role
        and record.fingerprint == own.fingerprint
        and record.state != types_pb2.WORKER_STATE_DRAINING
    ]


async def _any_answers(
    host: WorkerHost, peers: list[types_pb2.WorkerRecord], told: set[tuple[str, int]]
) -> bool:
    """Asks all of them at once, until one answers. `told`: those whose silence the log tells."""
    asked = [asyncio.ensure_future(_answers(host, record, told)) for record in peers]
    try:
        for answer in asyncio.as_completed(asked):
            if await answer:
                return True
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return False


async def _answers(
    host: WorkerHost, record: types_pb2.WorkerRecord, told: set[tuple[str, int]]
) -> bool:
    address = worker_pb2.WorkerAddress(
        worker_id=record.worker_id, address=record.address, epoch=record.epoch
    )
    life = (record.worker_id, record.epoch)
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            await host.peers.connected(address)
    except (BatonError, TimeoutError) as error:
        if life not in told:
            told.add(life)
            fields = {"peer": record.worker_id, "address": record.address}
            reason = str(error) or "no answer in time"
            event(logger, logging.ERROR, "peer_unreachable", **fields, error=reason)
        return False
    return True
