"""What routers have sent that no load report tells yet, told to each other through Redis.

    own predicted load  ->  Redis, with a lease  ->  sum of the other routers'

One call a period, off the path of requests. Between two of them a worker's new report counts
instead of what others have sent there, as it does for what the router itself has sent. Without
Redis each router goes by its own numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib import resources

from pydantic import TypeAdapter, ValidationError

from core.errors import Unavailable
from core.logs import event
from core.redis_client import RedisClient, redis_errors
from router.attach import WorkerLink
from router.predicted_load import PredictedLoad
from router.routing import Work

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
LEASE_S = 1.0
"""So long a router counts that says nothing any more."""
_TIMEOUT_S = 0.2
_PAUSE_S = 1.0
_KEY = "baton:routers-sent"

Life = tuple[str, int]
"""Worker id and epoch."""
_Entry = tuple[str, int, float, float, float]
_ENTRIES = TypeAdapter(list[_Entry])
"""Worker id, epoch, queued blocks, sequences, context blocks."""


class LoadExchange:
    """One router's part. `links` are the workers that it knows now."""

    def __init__(
        self, redis: RedisClient, router_id: str, links: Callable[[], Iterable[WorkerLink]]
    ) -> None:
        self._router_id = router_id
        self._links = links
        script = resources.files("router").joinpath("load_exchange.lua")
        self._script = redis.register_script(script.read_text(encoding="utf-8"))
        self._is_away = False

    async def run(self) -> None:
        """Exchanges until cancelled."""
        while True:
            try:
                await self.exchange()
                pause_s = PERIOD_S
                if self._is_away:
                    event(logger, logging.INFO, "load_exchange_back")
                self._is_away = False
            except (Unavailable, TimeoutError) as error:
                for link in self._links():
                    link.predicted.others = Work()
                pause_s = _PAUSE_S
                if not self._is_away:
                    event(logger, logging.WARNING, "load_exchange_away", error=error)
                self._is_away = True
            await asyncio.sleep(pause_s)

    async def exchange(self) -> None:
        """Publishes and reads once. Raises Unavailable, TimeoutError."""
        own = packed({(link.worker_id, link.epoch): link.predicted for link in self._links()})
        async with asyncio.timeout(_TIMEOUT_S):
            with redis_errors():
                sent = await self._script(keys=[_KEY], args=[self._router_id, LEASE_S, own])
        others = summed(sent)
        for link in self._links():
            link.predicted.others = others.get((link.worker_id, link.epoch), Work())


def packed(predicted: Mapping[Life, PredictedLoad]) -> bytes:
    """What a router has sent to workers, as others read it; those without any are left out."""
    entries = [
        (*life, load.own.queued_blocks, load.own.sequences, load.own.context_blocks)
        for life, load in predicted.items()
        if len(load)
    ]
    return _ENTRIES.dump_json(entries)


def summed(sent: Iterable[bytes]) -> dict[Life, Work]:
    """What several routers have sent to each worker. What cannot be read counts nothing."""
    total: defaultdict[Life, Work] = defaultdict(Work)
    for data in sent:
        try:
            entries = _ENTRIES.validate_json(data)
        except ValidationError:
            # A router of another version, during an upgrade.
            continue
        for worker_id, epoch, queued_blocks, sequences, context_blocks in entries:
            work = total[worker_id, epoch]
            work.queued_blocks += queued_blocks
            work.sequences += sequences
            work.context_blocks += context_blocks
    return dict(total)
