"""Whether this worker's links to its peers are as fast as was asked for.

Which way blocks go is known once one was read, so a worker that was asked for a fast link
reads a block of its peers by itself until it has found one. As long as it knows only slower
links it takes no new requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from baton.v1 import types_pb2, worker_pb2
from core.errors import BatonError, Unavailable
from core.logs import event
from core.registry import Registry
from core.tasks import TaskSet
from engine.block_pool import BlockPool
from kvtransfer.base import BlockCopy, Pull, Transport
from kvtransfer.peers import PeerDirectory
from kvtransfer.routes import LinkKind, UcxLog, link_kind

logger = logging.getLogger(__name__)

WATCH_S = 1.0
PROBE_TIMEOUT_S = 10.0
ANY = "any"


@dataclass(frozen=True)
class LinkVerdict:
    """What is known of a worker's links."""

    required: LinkKind | None = None
    """None: every link will do."""
    routes: tuple[str, ...] = ()
    has_looked: bool = False

    @property
    def is_found(self) -> bool:
        """Whether a link is as fast as required."""
        return self.required is None or any(link_kind(r) >= self.required for r in self.routes)

    @property
    def reason(self) -> str:
        """Why the worker takes no new requests; empty when its links are no reason."""
        if self.is_found or self.required is None:
            return ""
        if not self.has_looked:
            return "its links have not been looked at yet"
        if not self.routes:
            return ""
        found = ", ".join(self.routes)
        return f"its KV moves over {found}, slower than --kv-require {self.required.label}"


@dataclass
class LinkProbe:
    """Reads one block of a peer, to see which way it comes. `on_room`: the own block that it
    took for that is free again."""

    transport: Transport
    peers: PeerDirectory
    pool: BlockPool
    tasks: TaskSet
    on_room: Callable[[], None]

    async def read_from(self, address: worker_pb2.WorkerAddress) -> None:
        """The bytes are not looked at. Raises a BatonError, or TimeoutError."""
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            peer = await self.peers.connected(address)
            blocks = self.pool.allocate(1)
            if blocks is None:
                raise Unavailable("no block is free to read into")
            pull = self.transport.pull(peer.agent, [BlockCopy(0, blocks[0])])
            try:
                await pull.done()
            except BaseException:
                pull.abort()
                self.pool.quarantine(blocks)
                self.tasks.start(self._settle(pull, blocks))
                raise
            self.pool.release(blocks)
            self.on_room()

    async def _settle(self, pull: Pull, blocks: list[int]) -> None:
        await pull.settled()
        self.pool.settle(blocks)
        self.on_room()


class LinkWatch:
    """Keeps `verdict` up to date. `on_change`: the worker may have to change its state."""

    def __init__(
        self,
        require: str | None,
        probe: LinkProbe,
        log: UcxLog | None,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`require`: a LinkKind's label, "any", or None to leave UCX's log alone. Without a
        `log` nothing is known of UCX's links."""
        required = None if require in (None, ANY) else LinkKind.of_label(require)
        self._probe = probe
        self._log = log
        self._on_change = on_change
        self._probed: set[tuple[str, int]] = set()
        self.verdict = LinkVerdict(required, self._static_routes())

    def _static_routes(self) -> tuple[str, ...]:
        return ("tcp/sockets",) if self._probe.transport.name == "tcp" else ()

    async def _routes(self) -> tuple[str, ...]:
        found = () if self._log is None else await asyncio.to_thread(self._log.routes)
        return self._static_routes() + found

    async def run(self, registry: Registry, own: Callable[[], types_pb2.WorkerRecord]) -> None:
        """Looks again and again."""
        while True:
            await self.look(registry, own())
            await asyncio.sleep(WATCH_S)

    async def look(self, registry: Registry, own: types_pb2.WorkerRecord) -> None:
        """Once: reads from peers that may serve `own`, if need be, and judges."""
        if not self.verdict.is_found and self._log is not None:
            await self._probe_peers(registry, own)
        routes = await self._routes()
        before, self.verdict = self.verdict, LinkVerdict(self.verdict.required, routes, True)
        if before.routes != routes:
            event(logger, logging.INFO, "kv_routes", routes=", ".join(routes))
        if before.reason == self.verdict.reason:
            return
        if self.verdict.reason:
            event(logger, logging.ERROR, "kv_links_too_slow", reason=self.verdict.reason)
        await self._on_change()

    async def _probe_peers(self, registry: Registry, own: types_pb2.WorkerRecord) -> None:
        """Those of the other role, each life once, until a link is fast enough."""
        try:
            records = await registry.list()
        except Unavailable:
            return
        for record in records:
            life = (record.worker_id, record.epoch)
            fits = record.role != own.role and record.fingerprint == own.fingerprint
            if not fits or life in self._probed:
                continue
            address = worker_pb2.WorkerAddress(
                worker_id=record.worker_id, address=record.address, epoch=record.epoch
            )
            try:
                await self._probe.read_from(address)
            except (BatonError, TimeoutError) as error:
                event(logger, logging.WARNING, "kv_probe", peer=record.worker_id, error=error)
                continue
            self._probed.add(life)
            if replace(self.verdict, routes=await self._routes()).is_found:
                return
