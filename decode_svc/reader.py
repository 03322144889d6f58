"""Brings what prefill announces into place: pull, verify, release, with the lease kept alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.v1 import kv_transfer_pb2
from core.errors import BatonError, TransferError
from core.logs import event
from core.rpc import pod_errors
from core.tracing import Span
from decode_svc.request import News, Request
from kvtransfer.base import BlockPart
from kvtransfer.imports import LEASE_OVER, Import, ImportTable
from kvtransfer.peers import CONTROL_TIMEOUT_S
from worker.block_reader import BlockReader
from worker.host import WorkerHost
from worker.requests import RequestTable

logger = logging.getLogger(__name__)


class Reader:
    """Reads for requests; the import table owns the blocks that it reads into."""

    def __init__(
        self,
        host: WorkerHost,
        imports: ImportTable,
        requests: RequestTable[Request],
        on_room: Callable[[], None],
    ) -> None:
        self._host = host
        self._imports = imports
        self._requests = requests
        self._block_bytes = host.engine.kv_cache.block_bytes
        self._blocks = BlockReader(host, imports, on_room)

    async def receive(self, request: Request) -> tuple[Import, kv_transfer_pb2.AnnounceRequest]:
        """Reads what prefill announces until all of it is here and right.

        Returns the import, whose blocks are the caller's from now on, and the last
        announcement. Raises TransferError when the lease did not hold or a digest differs.
        """
        async with self._renewing(request):
            with request.span.child("decode.wait"):
                news = await request.news.get()
            with request.span.child("decode.transfer") as span:
                return await self._transfer(request, news, span)

    async def _transfer(
        self, request: Request, news: News, span: Span
    ) -> tuple[Import, kv_transfer_pb2.AnnounceRequest]:
        """`news` is the first announcement."""
        while True:
            heard_at = self._host.clock()
            if news.copies:
                await self._pull(request, news)
                await self._verify(request, news)
            if news.message.is_last:
                break
            news = await request.news.get()
        self._imports.begin_release(request.key)
        lease_held = await self._release(request)
        blocks = self._imports.commit(request.key, lease_held)
        if blocks is None:
            raise TransferError(LEASE_OVER)
        exposed_s = self._host.clock() - heard_at
        self._host.counters.exposed_s += exposed_s
        span.set(
            {
                "baton.transferred_blocks": request.num_pulled,
                "baton.transferred_bytes": request.num_pulled * self._block_bytes,
                "baton.exposed_s": exposed_s,
            }
        )
        return blocks, news.message

    async def give_up_export(self, request: Request) -> None:
        """Tells prefill that nothing will be read any more, whatever was."""
        try:
            await self._release(request)
        except BatonError as failure:
            # Prefill's lease frees the blocks in its own time.
            event(logger, logging.DEBUG, "release_failed", error=failure)

    async def _pull(self, request: Request, news: News) -> None:
        part = news.part or BlockPart(0, self._block_bytes)
        await self._blocks.read(request.key, request.peer, news.copies, part)
        if part.offset + part.num_bytes == self._block_bytes:
            request.num_pulled += len(news.copies)

    async def _verify(self, request: Request, news: News) -> None:
        """Compares the blocks that have just been read with what prefill says they are."""
        message = news.message
        first, end = message.first_block, message.first_block + len(message.block_ids)
        indices = request.digest_plan.indices(first, end)
        blocks = [news.copies[index - first].destination for index in indices]
        actual = await self._host.digests.of(blocks, news.part)
        if actual == list(message.digests):
            return
        wrong = [i for i, a, b in zip(indices, actual, message.digests, strict=False) if a != b]
        request.first_damaged = damaged = wrong[0] if wrong else first
        # No fault when prefill has taken the blocks back, as after a cancel: it knows.
        event(logger, logging.WARNING, "block_differs", request_id=request.key[0], index=damaged)
        # Before the next attempt can begin on what prefill has cached.
        await self.give_up_export(request)
        raise TransferError(f"block {damaged} of the prompt's KV did not arrive as it was computed")

    async def _release(self, request: Request) -> bool:
        """Tells prefill that nothing will be read any more. Whether the lease held."""
        message = kv_transfer_pb2.ReleaseRequest(
            request_id=request.key[0],
            attempt=request.key[1],
            first_damaged_block=request.first_damaged,
        )
        reply: kv_transfer_pb2.ReleaseReply = await request.peer.tell(
            request.peer.exports.Release, message
        )
        request.is_released = True
        return reply.lease_held

    @asynccontextmanager
    async def _renewing(self, request: Request) -> AsyncIterator[None]:
        """Keeps prefill's lease alive meanwhile."""
        task = self._host.tasks.start(self._renew(request))
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, request: Request) -> None:
        """Ends a request whose lease is over although it still reads: it reads for nothing."""
        message = kv_transfer_pb2.RenewRequest(request_id=request.key[0], attempt=request.key[1])
        while True:
            await asyncio.sleep(self._host.settings.lease_s / 3)
            try:
                with pod_errors(request.peer.worker_id):
                    reply = await request.peer.exports.Renew(message, timeout=CONTROL_TIMEOUT_S)
            except BatonError as failure:
                # Whether the lease held is what the release answers.
                event(logger, logging.DEBUG, "renew_failed", error=failure)
                continue
            if not reply.lease_held and self._imports.is_reading(request.key):
                self._requests.fail(request.key, TransferError(LEASE_OVER))
