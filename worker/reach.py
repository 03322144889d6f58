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
    """Asks all of them at once. `told`: those whose silence the log tells already."""
    answers = await asyncio.gather(*(_error_of(host, record) for record in peers))
    for record, error in zip(peers, answers, strict=True):
        life = (record.worker_id, record.epoch)
        if error is not None and life not in told:
            told.add(life)
            event(
                logger,
                logging.ERROR,
                "peer_unreachable",
                peer=record.worker_id,
                address=record.address,
                error=error,
            )
    return None in answers


async def _error_of(host: WorkerHost, record: types_pb2.WorkerRecord) -> BatonError | None:
    """What keeps the two apart; None: the other one has answered."""
    address = worker_pb2.WorkerAddress(
        worker_id=record.worker_id, address=record.address, epoch=record.epoch
    )
    try:
        await host.peers.connected(address)
    except BatonError as error:
        return error
    return None
