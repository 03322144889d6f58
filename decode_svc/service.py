"""One request's way through a decode worker.

    dispatch → grant (room) → pull what prefill announces → release → commit → decode

Until the commit the import owns the blocks, after it the sequence. The request's task is the
owner of both: its `finally` frees them on every path. A dispatch without a prefill worker goes
the way of `decode_svc.local`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.v1 import (
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from core.errors import BatonError, TransferError, Unavailable
from core.hashing import block_hashes
from core.logs import event
from core.rpc import pod_errors
from decode_svc.local import LocalMeter, check_local, start_local
from decode_svc.room import Room
from engine.batch import SequenceUpdate, StepBatch
from engine.sequence import Sequence
from kvtransfer.base import BlockCopy, BlockPart, Pull
from kvtransfer.digests import DigestPlan
from kvtransfer.imports import Announcement, ImportKey, ImportTable, PoolActions
from kvtransfer.peers import Peer
from kvtransfer.service import ImportService
from worker.convert import sequence_from_dispatch, token_output
from worker.host import RoleService, WorkerHost
from worker.requests import RequestKey, RequestTable

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
"""For short messages to prefill."""
LEASE_OVER = "the lease of the exported blocks was over before the read"


@dataclass(frozen=True)
class _News:
    """One announcement: what to read, and the message itself."""

    copies: list[BlockCopy]
    part: BlockPart | None
    message: kv_transfer_pb2.AnnounceRequest


@dataclass(eq=False)
class _Request:
    """State of one request."""

    dispatch: worker_pb2.Dispatch
    prefill: Peer | None
    """None: the prompt is computed here."""
    sequence: Sequence
    digest_plan: DigestPlan
    num_missing_blocks: int
    """Blocks that it needs and the cache had not, when it came."""
    news: asyncio.Queue[_News] = field(default_factory=asyncio.Queue)
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set when the sequence has finished, or to the error that ended it."""
    num_pulled: int = 0
    is_released: bool = False

    @property
    def key(self) -> RequestKey:
        return self.sequence.key

    @property
    def peer(self) -> Peer:
        """Of a request that is handed off."""
        assert self.prefill is not None, "computed here"
        return self.prefill

    def end(self, error: Exception | None = None) -> None:
        """The sequence is over. Nothing when the task was cancelled meanwhile."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class DecodeService(RoleService, worker_pb2_grpc.DecodeServicer):
    """Policy of a decode worker; the engine and the import table are its mechanism."""

    role = types_pb2.ROLE_DECODE
    grpc_services = ("baton.v1.Decode", "baton.v1.KvImport")

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        pool = host.engine.pool
        actions = PoolActions(pool.release, pool.quarantine, pool.settle)
        block_bytes = host.engine.kv_cache.block_bytes
        self._imports = ImportTable(
            host.settings.import_timeout_s, block_bytes, host.clock, actions
        )
        self._room = Room(pool, host.engine.scheduler, self._imports)
        self._requests: RequestTable[_Request] = RequestTable(host.hub, host.tasks, host.clock)
        self._local_meter = LocalMeter()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(self, server)
        kv_transfer_pb2_grpc.add_KvImportServicer_to_server(ImportService(self), server)

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> worker_pb2.DispatchReply:
        """Takes one request in; refuses at once what could not be served."""
        dispatch = request.dispatch
        self._host.require_ready()
        self._host.hub.require(dispatch.router_id)
        sequence = sequence_from_dispatch(
            dispatch, self._host.identity.fingerprint, self._host.engine.max_model_len
        )
        peer = None
        if request.HasField("prefill"):
            peer = await self._host.peers.connected(request.prefill)
            # The router may have left meanwhile, and its requests end when it leaves.
            self._host.hub.require(dispatch.router_id)
        else:
            check_local(dispatch.n, dispatch.HasField("prompt_logprobs"))
        sequence.block_hashes = self._hashes(sequence)
        state = _Request(
            dispatch,
            peer,
            sequence,
            self._host.settings.digest_plan(),
            self._num_missing_blocks(sequence),
        )
        self._requests.start(dispatch, state, self._serve)
        return worker_pb2.DispatchReply()

    async def _serve(self, request: _Request) -> None:
        try:
            if request.prefill is None:
                pool = self._host.engine.pool
                await start_local(request.sequence, self._room, self._host.loop, pool.block_size)
            else:
                await self._receive(request)
            await request.ended
        finally:
            self._free(request)

    def _free(self, request: _Request) -> None:
        request.ended.cancel()
        self._room.withdraw(request.key)
        self._imports.abort(request.key)
        self._host.loop.abort(request.key)
        if request.prefill is not None and not request.is_released:
            self._host.tasks.start(self._give_up_export(request))
        self.on_room()

    async def _give_up_export(self, request: _Request) -> None:
        try:
            await self._release(request)
        except BatonError as failure:
            # Prefill's lease frees the blocks in its own time.
            event(logger, logging.DEBUG, "release_failed", error=failure)

    async def _receive(self, request: _Request) -> None:
        """Reads what prefill announces until the sequence can run here."""
        async with self._renewing(request):
            while True:
                news = await request.news.get()
                if news.copies:
                    await self._pull(request, news)
                    await self._verify(request, news)
                if news.message.is_last:
                    break
            self._imports.begin_release(request.key)
            lease_held = await self._release(request)
        block_table = self._imports.commit(request.key, lease_held)
        if block_table is None:
            raise TransferError(LEASE_OVER)
        self._commit(request, news.message, block_table)

    async def _pull(self, request: _Request, news: _News) -> None:
        began_at = self._host.clock()
        pull = self._host.transport.pull(request.peer.agent, news.copies, news.part)
        self._imports.begin_read(request.key)
        try:
            await pull.done()
        except BaseException:
            pull.abort()
            self._imports.abort(request.key)
            self._host.tasks.start(self._settle(request.key, pull))
            raise
        self._imports.end_read(request.key, len(news.copies))
        block_bytes = self._host.engine.kv_cache.block_bytes
        part = news.part or BlockPart(0, block_bytes)
        elapsed_s = self._host.clock() - began_at
        request.peer.link.observe(len(news.copies) * part.num_bytes, elapsed_s)
        if part.offset + part.num_bytes == block_bytes:
            request.num_pulled += len(news.copies)

    async def _verify(self, request: _Request, news: _News) -> None:
        """Compares the blocks that have just been read with what prefill says they are."""
        message = news.message
        first, end = message.first_block, message.first_block + len(message.block_ids)
        indices = request.digest_plan.indices(first, end)
        blocks = [news.copies[index - first].destination for index in indices]
        actual = await self._host.digests.of(blocks, news.part)
        if actual == list(message.digests):
            return
        wrong = [i for i, a, b in zip(indices, actual, message.digests, strict=False) if a != b]
        damaged = wrong[0] if wrong else first
        # No fault when prefill has taken the blocks back, as after a cancel: it knows.
        event(logger, logging.WARNING, "block_differs", request_id=request.key[0], index=damaged)
        await self._release(request, damaged)
        raise TransferError(f"block {damaged} of the prompt's KV did not arrive as it was computed")

    async def _settle(self, key: ImportKey, pull: Pull) -> None:
        """Frees quarantined blocks once nothing can land in them."""
        await pull.settled()
        self._imports.end_read(key, 0)
        self.on_room()

    async def _release(self, request: _Request, first_damaged: int | None = None) -> bool:
        """Tells prefill that nothing will be read any more. Whether the lease held."""
        message = kv_transfer_pb2.ReleaseRequest(
            request_id=request.key[0],
            attempt=request.key[1],
            first_damaged_block=first_damaged,
        )
        with pod_errors(request.peer.worker_id):
            reply: kv_transfer_pb2.ReleaseReply = await request.peer.exports.Release(
                message, timeout=CONTROL_TIMEOUT_S
            )
        request.is_released = True
        return reply.lease_held

    @asynccontextmanager
    async def _renewing(self, request: _Request) -> AsyncIterator[None]:
        """Keeps prefill's lease alive meanwhile."""
        task = self._host.tasks.start(self._renew(request))
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, request: _Request) -> None:
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

    def _commit(
        self, request: _Request, news: kv_transfer_pb2.AnnounceRequest, block_table: list[int]
    ) -> None:
        """The KV is here and right: from now on the sequence owns the blocks."""
        sequence = request.sequence
        sequence.num_computed_tokens = sequence.num_tokens
        first = news.first_tokens[0]
        sequence.output_token_ids.append(first.token_id)
        sequence.block_table = block_table
        self._host.loop.add_computed(sequence)
        output = worker_pb2.SequenceOutput(
            request_id=request.key[0],
            attempt=request.key[1],
            output_index=sequence.num_prior_outputs,
            token_ids=[first.token_id],
            transferred_blocks=request.num_pulled,
        )
        if first.HasField("logprobs"):
            output.logprobs.append(first.logprobs)
        self._host.hub.publish(request.dispatch.router_id, output)

    # ImportPolicy: what prefill says

    async def grant(
        self, key: ImportKey, prefill_epoch: int, decode_epoch: int
    ) -> kv_transfer_pb2.GrantReply:
        request = self._require(key)
        if (request.peer.epoch, self._host.identity.epoch) != (prefill_epoch, decode_epoch):
            raise Unavailable("one of the two workers has restarted since the dispatch")
        try:
            await self._room.take(request.sequence)
        except asyncio.CancelledError:
            if self._requests.get(key) is request:
                raise
            raise TransferError("the request ended while it waited for room") from None
        entry = self._imports.get(key)
        if entry is None:
            raise TransferError("the request ended while it waited for room")
        link = request.peer.link.estimate()
        return kv_transfer_pb2.GrantReply(
            num_held_blocks=len(entry.held),
            digest_every=request.digest_plan.every,
            digest_offset=request.digest_plan.offset,
            link_bytes_per_s=link.bytes_per_s,
            link_overhead_s=link.overhead_s,
        )

    def announce(self, request: kv_transfer_pb2.AnnounceRequest) -> None:
        key = (request.request_id, request.attempt)
        state = self._require(key)
        part = None
        if request.part_bytes:
            part = BlockPart(request.part_offset, request.part_bytes)
        news = Announcement(
            request.sequence, request.first_block, request.block_ids, request.is_last, part
        )
        copies = self._imports.announce(key, news)
        if copies is not None:
            state.news.put_nowait(_News(copies, part, request))

    def revoke(self, key: ImportKey, error: types_pb2.ErrorDetail | None) -> None:
        request = self._requests.get(key)
        if request is None or request.prefill is None:
            return
        if error is not None:
            event(logger, logging.INFO, "prefill_gave_up", request_id=key[0], code=error.code)
        # The router hears of a failure from prefill itself.
        request.is_released = True
        self._requests.abort(key)

    def _require(self, key: ImportKey) -> _Request:
        request = self._requests.get(key)
        if request is None or request.prefill is None:
            raise TransferError(f"{key[0]} attempt {key[1]} is not known here")
        return request

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        pool = self._host.engine.pool
        num_blocks = -(-sequence.num_tokens // pool.block_size)
        return num_blocks - pool.match_length(sequence.block_hashes)

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        size = self._host.engine.pool.block_size
        return block_hashes(sequence.token_slice(0, sequence.num_tokens), size, sequence.scope)

    # StepObserver: on the event loop, between steps

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        """Blocks belong to their sequences already."""
        self._local_meter.begin(batch, self._host.clock())
        return frozenset()

    def on_layers(self, batch: StepBatch, num_layers: int) -> None:
        """Not asked for."""

    def on_preempted(self, sequences: list[Sequence]) -> None:
        """Sends long ones back to prefill: computing them here would stall the batch."""
        for sequence in sequences:
            request = self._requests.get(sequence.key)
            if request is None or sequence.num_tokens <= self._host.settings.max_recompute_tokens:
                continue
            event(logger, logging.INFO, "preempted", request_id=sequence.request_id)
            self._host.loop.abort(sequence.key)
            output = worker_pb2.SequenceOutput(
                request_id=sequence.request_id, attempt=sequence.attempt, preempted=True
            )
            self._host.hub.publish(request.dispatch.router_id, output)
            request.end()

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        """Sends every new token; all of a step travel in one message per router."""
        self._local_meter.end(self._host.clock())
        for update in updates:
            request = self._requests.get(update.sequence.key)
            if request is None or update.token is None:
                continue
            output = token_output(
                update.sequence, update.token, update.output_index, update.finish_reason
            )
            if request.prefill is None:
                output.cached_tokens = update.sequence.num_cached_tokens
            self._host.hub.publish(request.dispatch.router_id, output)
            if update.finish_reason is not None:
                request.end()

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        request = self._requests.get(sequence.key)
        if request is not None:
            request.end(error)

    # RoleService

    def abort(self, key: RequestKey) -> bool:
        return self._requests.abort(key)

    def abort_router(self, router_id: str) -> None:
        self._requests.abort_router(router_id)

    def refuse_waiting(self, error: BatonError) -> None:
        self._requests.fail_where(lambda request: not self._has_begun(request), error)

    def _has_begun(self, request: _Request) -> bool:
        """Whether blocks belong to it, or did."""
        if self._imports.get(request.key) is not None or request.sequence.block_table:
            return True
        return request.sequence.num_computed_tokens > 0

    def on_room(self) -> None:
        self._room.update()
        self._host.loop.wake()

    def reap(self) -> None:
        for key in self._imports.reap():
            event(logger, logging.WARNING, "import_expired", request_id=key[0])
            self._requests.fail(key, Unavailable("nothing was heard from prefill in time"))
        self._requests.forget_old()
        self.on_room()

    def load(self) -> types_pb2.Load:
        scheduler = self._host.engine.scheduler
        return types_pb2.Load(
            queue_depth=self._room.num_waiting + scheduler.num_waiting,
            queued_tokens=scheduler.num_queued_tokens,
            running=scheduler.num_running,
            imports=self._imports.num_open,
            requests=len(self._requests),
            pending_blocks=sum(
                request.num_missing_blocks
                for request in self._requests
                if not self._has_begun(request)
            ),
            prefill_s_per_token=self._local_meter.s_per_token,
        )
