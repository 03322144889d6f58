"""One prompt's way through a prefill worker.

    gate → grant from decode → engine → announce blocks as they become final → lease

The first token goes to the router at once. The blocks stay pinned by the export until decode
has released it or its lease is over; the request's task ends with the last announcement.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
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
from core.errors import (
    BatonError,
    InternalError,
    TransferError,
    Unavailable,
    from_exception,
    to_detail,
)
from core.hashing import block_hashes
from core.logs import event
from core.rpc import pod_errors
from engine.batch import SampledToken, ScheduledSequence, SequenceUpdate, StepBatch
from engine.sequence import FinishReason, Sequence
from kvtransfer.digests import DigestPlan
from kvtransfer.exports import ExportKey, ExportTable
from kvtransfer.link import LinkEstimate
from kvtransfer.peers import Peer
from kvtransfer.service import ExportService
from prefill_svc.gate import Gate, Ticket
from prefill_svc.overlap import Chunk, layer_boundaries
from prefill_svc.progress import Piece, Pieces, Progress, ProgressQueue
from worker.compute_meter import ComputeMeter
from worker.convert import logprobs_to_proto, sequence_from_dispatch, token_output
from worker.host import RoleService, WorkerHost
from worker.requests import RequestKey, RequestTable

logger = logging.getLogger(__name__)

STEPS_AHEAD = 2
"""Steps' worth of prompts that may hold a grant before they are computed."""
CONTROL_TIMEOUT_S = 10.0
"""For short messages to decode."""


@dataclass(eq=False)
class _Prompt:
    """State of one request."""

    dispatch: worker_pb2.Dispatch
    decode: worker_pb2.WorkerAddress
    sequence: Sequence
    ticket: Ticket
    num_uncached: int
    """Tokens to compute, as it seemed when the prompt came."""
    block_ids: list[int] = field(default_factory=list)
    progress: ProgressQueue = field(default_factory=ProgressQueue)
    peer: Peer | None = None
    link: LinkEstimate | None = None
    """What decode has measured of the way to it."""
    is_known_to_decode: bool = False

    @property
    def key(self) -> RequestKey:
        return self.sequence.key

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute."""
        if not self.block_ids:
            return self.num_uncached
        return self.sequence.num_tokens - self.sequence.num_computed_tokens


class PrefillService(RoleService, worker_pb2_grpc.PrefillServicer):
    """Policy of a prefill worker; the engine and the export table are its mechanism."""

    role = types_pb2.ROLE_PREFILL
    grpc_services = ("baton.v1.Prefill", "baton.v1.KvExport")

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        pool = host.engine.pool
        self._exports = ExportTable(
            host.settings.lease_config(), host.clock, pool.acquire, pool.release
        )
        self._gate = Gate(
            max_tokens_ahead=STEPS_AHEAD * host.settings.max_num_batched_tokens,
            max_pinned_blocks=int(host.settings.max_export_share * pool.num_blocks),
            num_pinned=lambda: self._exports.num_pinned_blocks,
        )
        self._block_size = pool.block_size
        self._block_bytes = host.engine.kv_cache.block_bytes
        self._num_layers = host.engine.model_config.num_layers
        self._compute_meter = ComputeMeter()
        self._step_began_at = 0.0
        self._num_step_tokens = 0
        self._requests: RequestTable[_Prompt] = RequestTable(host.hub, host.tasks, host.clock)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, server)
        exports = ExportService(
            self._host.identity,
            self._host.transport,
            self._exports,
            self._on_released,
            self._on_damaged,
        )
        kv_transfer_pb2_grpc.add_KvExportServicer_to_server(exports, server)

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> worker_pb2.DispatchReply:
        """Queues one prompt."""
        dispatch = request.dispatch
        self._host.require_ready()
        self._host.hub.require(dispatch.router_id)
        sequence = sequence_from_dispatch(
            dispatch, self._host.identity.fingerprint, self._host.engine.max_model_len
        )
        num_outputs = len(sequence.output_token_ids)
        # One token is all that prefill makes; `_finish_reason` knows the request's own limit.
        sequence.sampling = dataclasses.replace(sequence.sampling, max_tokens=num_outputs + 1)
        num_blocks = -(-sequence.num_tokens // self._host.engine.pool.block_size)
        ticket = Ticket(request.decode.worker_id, sequence.num_tokens, num_blocks)
        prompt = _Prompt(dispatch, request.decode, sequence, ticket, self._num_uncached(sequence))
        self._requests.start(dispatch, prompt, self._serve)
        return worker_pb2.DispatchReply()

    def _num_uncached(self, sequence: Sequence) -> int:
        size = self._block_size
        tokens = sequence.token_slice(0, sequence.num_tokens)
        sequence.block_hashes = block_hashes(tokens, size, sequence.scope)
        # The newest token is computed in any case.
        reusable = sequence.block_hashes[: (sequence.num_tokens - 1) // size]
        return sequence.num_tokens - self._host.engine.pool.match_length(reusable) * size

    async def _serve(self, prompt: _Prompt) -> None:
        key = prompt.key
        try:
            await self._gate.enter(prompt.ticket)
            grant = await self._ask_for_grant(prompt)
            self._exports.open(key)
            self._host.transport.set_num_exports(self._exports.num_open)
            self._host.loop.add(prompt.sequence)
            await self._hand_off(prompt, grant)
        except BaseException as error:
            self._exports.revoke(key)
            if prompt.is_known_to_decode:
                self._host.tasks.start(self._revoke_at_decode(prompt, error))
            raise
        finally:
            self._host.loop.abort(key)
            self._gate.leave(prompt.ticket)

    async def _ask_for_grant(self, prompt: _Prompt) -> kv_transfer_pb2.GrantReply:
        """Waits until decode has room."""
        peer = prompt.peer = await self._host.peers.get(prompt.decode)
        request = kv_transfer_pb2.GrantRequest(
            request_id=prompt.key[0],
            attempt=prompt.key[1],
            prefill_worker=self._host.identity.worker_id,
            prefill_epoch=self._host.identity.epoch,
            decode_epoch=prompt.decode.epoch,
        )
        prompt.is_known_to_decode = True
        timeout_s = prompt.dispatch.timeout_s or None
        with pod_errors(peer.worker_id):
            grant: kv_transfer_pb2.GrantReply = await peer.imports.Grant(request, timeout=timeout_s)
        prompt.link = LinkEstimate(grant.link_bytes_per_s, grant.link_overhead_s)
        return grant

    async def _hand_off(self, prompt: _Prompt, grant: kv_transfer_pb2.GrantReply) -> None:
        """Announces blocks as they become final, the first token with the last of them."""
        plan = DigestPlan(grant.digest_every, grant.digest_offset)
        pieces = Pieces(grant.num_held_blocks, self._num_layers, self._block_bytes)
        while True:
            progress = await prompt.progress.get()
            if progress.error is not None:
                raise progress.error
            if progress.finish_reason is not None:
                self._exports.revoke(prompt.key)
                self._host.tasks.start(self._revoke_at_decode(prompt, None))
                return
            piece = pieces.due(progress)
            if piece is None:
                continue
            news = await self._announcement(prompt, piece, plan)
            if progress.token is not None:
                _add_first_token(news, progress.token)
                news.is_last = True
                if not self._exports.announced(prompt.key):
                    raise TransferError("decode gave the hand-off up")
            assert prompt.peer is not None
            with pod_errors(prompt.peer.worker_id):
                await prompt.peer.imports.Announce(news, timeout=CONTROL_TIMEOUT_S)
            if news.is_last:
                return

    async def _announcement(
        self, prompt: _Prompt, piece: Piece, plan: DigestPlan
    ) -> kv_transfer_pb2.AnnounceRequest:
        verified = [prompt.block_ids[index] for index in plan.indices(piece.first, piece.end)]
        news = kv_transfer_pb2.AnnounceRequest(
            request_id=prompt.key[0],
            attempt=prompt.key[1],
            sequence=piece.sequence,
            first_block=piece.first,
            block_ids=prompt.block_ids[piece.first : piece.end],
            digests=await self._host.digests.of(verified, piece.part),
        )
        if piece.part is not None:
            news.part_offset, news.part_bytes = piece.part.offset, piece.part.num_bytes
        return news

    async def _revoke_at_decode(self, prompt: _Prompt, error: BaseException | None) -> None:
        assert prompt.peer is not None
        request = kv_transfer_pb2.RevokeRequest(request_id=prompt.key[0], attempt=prompt.key[1])
        if error is not None:
            request.error.CopyFrom(_reason(error))
        try:
            with pod_errors(prompt.peer.worker_id):
                await prompt.peer.imports.Revoke(request, timeout=CONTROL_TIMEOUT_S)
        except BatonError as failure:
            event(logger, logging.DEBUG, "revoke_failed", error=failure)

    # StepObserver: on the event loop, between steps

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        """Pins a prompt's blocks for its export as soon as the scheduler has allocated them.

        Returns where to cut the step's layers, so that their transfer hides behind it.
        """
        self._step_began_at = self._host.clock()
        self._num_step_tokens = batch.num_tokens
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.key)
            if prompt is not None and not prompt.block_ids:
                prompt.block_ids = list(item.sequence.block_table)
                self._exports.pin(prompt.key, prompt.block_ids)
                self._gate.leave(prompt.ticket)
        return self._layer_boundaries(batch)

    def _layer_boundaries(self, batch: StepBatch) -> frozenset[int]:
        if not self._host.settings.kv_overlap:
            return frozenset()
        num_blocks = 0
        links: list[LinkEstimate] = []
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.key)
            if prompt is not None and prompt.link is not None:
                num_blocks += self._final_after(item, prompt) - item.start // self._block_size
                links.append(prompt.link)
        if not links:
            return frozenset()
        compute_s = self._compute_meter.expected_s(batch.num_tokens)
        chunk = Chunk(self._num_layers, num_blocks * self._block_bytes, compute_s)
        return layer_boundaries(chunk, min(links, key=lambda link: link.bytes_per_s))

    def _final_after(self, item: ScheduledSequence, prompt: _Prompt) -> int:
        """How many leading blocks do not change any more after this step."""
        if item.samples:
            return len(prompt.block_ids)
        return (item.start + item.num_tokens) // self._block_size

    def on_layers(self, batch: StepBatch, num_layers: int) -> None:
        """Lets the requests' tasks announce what the step has finished so far."""
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.key)
            if prompt is not None:
                prompt.progress.put(Progress(self._final_after(item, prompt), num_layers))

    def on_preempted(self, sequences: list[Sequence]) -> None:
        """Does not happen: a prompt has all its blocks from its start on."""

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        """Sends first tokens to routers and wakes the requests' tasks."""
        elapsed_s = self._host.clock() - self._step_began_at
        self._compute_meter.observe(self._num_step_tokens, elapsed_s)
        for update in updates:
            prompt = self._requests.get(update.sequence.key)
            if prompt is None:
                continue
            reason = self._finish_reason(prompt, update)
            if update.token is not None:
                output = token_output(update.sequence, update.token, update.output_index, reason)
                output.cached_tokens = update.sequence.num_cached_tokens
                self._host.hub.publish(prompt.dispatch.router_id, output)
            end = update.sequence.num_computed_tokens // self._block_size
            if update.token is not None:
                end = len(prompt.block_ids)
            prompt.progress.put(Progress(end, self._num_layers, update.token, reason))

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        prompt = self._requests.get(sequence.key)
        if prompt is not None:
            prompt.progress.put(Progress(0, 0, error=error))

    def _finish_reason(self, prompt: _Prompt, update: SequenceUpdate) -> FinishReason | None:
        """Whether the first token ends the request by the limits that the client gave."""
        if update.finish_reason is not FinishReason.LENGTH:
            return update.finish_reason
        sequence = update.sequence
        at_limit = len(sequence.output_token_ids) >= prompt.dispatch.sampling.max_tokens
        is_full = sequence.num_tokens >= self._host.engine.max_model_len
        return FinishReason.LENGTH if at_limit or is_full else None

    # RoleService

    def abort(self, key: RequestKey) -> bool:
        was_announced = self._exports.revoke(key)
        return self._requests.abort(key) or was_announced

    def abort_router(self, router_id: str) -> None:
        # Announced exports go on: decode, which the router also left, gives them up.
        self._requests.abort_router(router_id)

    def _on_released(self, key: ExportKey, lease_held: bool) -> None:
        if not lease_held and self._requests.get(key) is not None:
            # Not silently: the revocation that follows may reach decode before decode has
            # told the router why.
            self._requests.fail(key, TransferError("decode gave the hand-off up"))
        self.on_room()

    def _on_damaged(self, block_ids: list[int]) -> None:
        """Decode read other bytes than were computed here: nobody may use either again.

        No blocks: the export was over, so that others may have written to them.
        """
        if not block_ids:
            return
        event(logger, logging.ERROR, "blocks_damaged", num_blocks=len(block_ids))
        self._host.engine.pool.drop_blocks(block_ids)

    def on_room(self) -> None:
        self._gate.update()
        self._host.loop.wake()

    def reap(self) -> None:
        for export in self._exports.reap():
            event(logger, logging.WARNING, "export_expired", request_id=export.key[0])
            self._requests.fail(export.key, Unavailable("the hand-off's lease is over"))
        self._requests.forget_old()
        self.on_room()

    def load(self) -> types_pb2.Load:
        scheduler = self._host.engine.scheduler
        return types_pb2.Load(
            queue_depth=self._gate.num_waiting + scheduler.num_waiting,
            queued_tokens=sum(prompt.num_remaining for prompt in self._requests),
            running=scheduler.num_running,
            exports=self._exports.num_open,
            requests=len(self._requests),
            prefill_s_per_token=self._compute_meter.s_per_token,
        )


def _add_first_token(news: kv_transfer_pb2.AnnounceRequest, token: SampledToken) -> None:
    first = news.first_tokens.add(token_id=token.token_id)
    if token.logprobs is not None:
        first.logprobs.CopyFrom(logprobs_to_proto(token.logprobs))


def _reason(error: BaseException) -> types_pb2.ErrorDetail:
    if isinstance(error, asyncio.CancelledError):
        return to_detail(Unavailable("prefill gave the request up"))
    if isinstance(error, Exception):
        return to_detail(from_exception(error))
    return to_detail(InternalError(type(error).__name__))
