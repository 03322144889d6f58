"""One request's way through a decode worker.

    dispatch → grant (room) → pull what prefill announces → release → commit → decode

Until the commit the import owns the blocks, after it the sequences of the request's choices. The
request's task is the owner of both: its `finally` frees them on every path. A dispatch without a
prefill worker goes the way of `decode_svc.local`.
"""

from __future__ import annotations

import logging

import grpc

from baton.v1 import kv_transfer_pb2_grpc, types_pb2, worker_pb2
from core.errors import BatonError, Unavailable
from core.hashing import block_hashes
from core.logs import event
from decode_svc.choices import Choices
from decode_svc.hand_off import HandOff
from decode_svc.local import LocalMeter, check_local, start_local
from decode_svc.reader import Reader
from decode_svc.request import Request
from decode_svc.room import Room
from engine.batch import SequenceUpdate, StepBatch
from engine.sequence import Sequence
from kvtransfer.imports import ImportTable, PoolActions
from kvtransfer.service import ImportService
from worker.convert import sequence_from_dispatch, token_output
from worker.exporter import Exporter
from worker.host import WorkerHost
from worker.outputs import PlainToken
from worker.requests import RequestKey, RequestTable, key_of
from worker.role import RoleService
from worker.spans import dispatch_span

logger = logging.getLogger(__name__)


class DecodeService(RoleService):
    """Policy of a decode worker; the engine and the import table are its mechanism."""

    role = types_pb2.ROLE_DECODE
    grpc_services = ("baton.v1.KvImport", "baton.v1.KvExport")

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        pool = host.engine.pool
        actions = PoolActions(pool.release, pool.quarantine, pool.settle)
        block_bytes = host.engine.kv_cache.block_bytes
        self._imports = ImportTable(
            host.settings.import_timeout_s, block_bytes, host.clock, actions
        )
        self._room = Room(pool, host.engine.scheduler, self._imports)
        self._requests: RequestTable[Request] = RequestTable(host.hub, host.tasks, host.clock)
        self._reader = Reader(host, self._imports, self._requests, self.on_room)
        self._hand_off = HandOff(host, self._imports, self._room, self._requests)
        self._choices = Choices(host)
        self._exporter = Exporter(host, lambda *_: self.on_room())
        self._local_meter = LocalMeter()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        kv_transfer_pb2_grpc.add_KvImportServicer_to_server(ImportService(self._hand_off), server)
        self._exporter.add_to_server(server)

    async def accept(self, assignment: worker_pb2.Assignment) -> None:
        """Takes one request in; refuses at once what could not be served."""
        try:
            await self._take_in(assignment)
        except Exception:
            self._requests.refused(key_of(assignment.dispatch))
            raise

    async def _take_in(self, assignment: worker_pb2.Assignment) -> None:
        dispatch = assignment.dispatch
        self._host.require_ready()
        prompt = sequence_from_dispatch(
            dispatch, self._host.identity.fingerprint, self._host.engine.max_model_len
        )
        prefill = None
        if assignment.HasField("partner"):
            prefill = await self._host.peers.connected(assignment.partner)
        else:
            check_local(dispatch.n, dispatch.HasField("prompt_logprobs"))
        prompt.block_hashes = self._hashes(prompt)
        plan = self._host.settings.digest_plan()
        # The router may have left meanwhile, and its requests end when it leaves.
        self._host.hub.require(dispatch.router_id)
        num_missing = self._num_missing_blocks(prompt)
        span = dispatch_span(self._host.tracer, "decode", dispatch)
        state = Request(dispatch, prefill, prompt, plan, num_missing, span)
        self._requests.start(dispatch, state, self._serve)

    async def _serve(self, request: Request) -> None:
        try:
            if request.prefill is None:
                block_size = self._host.engine.pool.block_size
                await start_local(request, self._room, self._host.loop, block_size)
            else:
                blocks, last_news = await self._reader.receive(request)
                self._choices.start(request, blocks, last_news.first_tokens)
            await self._generate(request)
        finally:
            self._free(request)

    async def _generate(self, request: Request) -> None:
        """Until every choice has ended; the engine does it."""
        is_local = request.prefill is None
        with request.span.child("decode.generate", {"baton.computes_prompt": is_local}) as span:
            try:
                await request.ended
            finally:
                request.end_generating(span)

    def _free(self, request: Request) -> None:
        request.ended.cancel()
        self._room.withdraw(request.key)
        self._imports.abort(request.key)
        self._choices.free(request)
        if request.prefill is not None and not request.is_released:
            self._host.tasks.start(self._reader.give_up_export(request))
        self.on_room()

    def _num_missing_blocks(self, prompt: Sequence) -> int:
        pool = self._host.engine.pool
        num_blocks = -(-prompt.num_tokens // pool.block_size)
        return num_blocks - pool.match_length(prompt.block_hashes)

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        size = self._host.engine.pool.block_size
        return block_hashes(sequence.token_slice(0, sequence.num_tokens), size, sequence.scope)

    # StepObserver: on the event loop, between steps

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        """Blocks belong to their sequences already."""
        return frozenset()

    def on_layers(self, batch: StepBatch, num_layers: int) -> None:
        """Not asked for."""

    def on_preempted(self, sequences: list[Sequence]) -> None:
        """Sends long ones back to prefill: computing them here would stall the batch."""
        for sequence in sequences:
            request = self._requests.get(sequence.request_key)
            if request is not None:
                request.span.event("preempted", {"baton.choice": sequence.choice})
                self._choices.give_back(request, sequence)

    def on_updates(self, updates: list[SequenceUpdate], batch: StepBatch, elapsed_s: float) -> None:
        """Sends every new token; all of a step travel in one message per router."""
        self._local_meter.observe(batch, elapsed_s)
        # Plain tokens come first, since nothing else may wait when they are packed together.
        for update in sorted(updates, key=_is_last):
            request = self._requests.get(update.sequence.request_key)
            if request is None or update.token is None:
                continue
            if request.says_only_token(update):
                token = PlainToken(
                    update.sequence.choice, update.output_index, update.token.token_id
                )
                self._host.hub.publish_token(request.dispatch, token)
                continue
            output = token_output(
                update.sequence, update.token, update.output_index, update.finish_reason
            )
            if request.prefill is None:
                self._note_first_token(request, update)
                output.cached_tokens = update.sequence.num_cached_tokens
            self._host.hub.publish(request.dispatch.router_id, output)
            if update.finish_reason is not None:
                request.end_choice(update.sequence.choice, update.finish_reason.value)

    def _note_first_token(self, request: Request, update: SequenceUpdate) -> None:
        """Once for a prompt that was computed here."""
        sequence = update.sequence
        if update.output_index == sequence.num_prior_outputs:
            self._host.counters.num_prefix_queries += sequence.num_tokens - 1
            self._host.counters.num_prefix_hits += sequence.num_cached_tokens
            cached = {"baton.cached_tokens": sequence.num_cached_tokens}
            request.span.event("first_token", cached)

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        request = self._requests.get(sequence.request_key)
        if request is not None:
            request.end(error)

    # RoleService

    def abort(self, key: RequestKey) -> None:
        self._requests.abort(key)

    def abort_choice(self, key: RequestKey, choice: int) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        self._choices.abort(request, choice)
        if len(request.cancelled) == request.num_choices:
            self._requests.abort(key)

    def abort_router(self, router_id: str) -> None:
        self._requests.abort_router(router_id)

    def refuse_waiting(self, error: BatonError) -> None:
        self._requests.fail_where(lambda request: not self._has_begun(request), error)

    def hand_over(self) -> None:
        """As if every sequence had been preempted: routers go on elsewhere."""
        for request in list(self._requests):
            self._choices.give_all_back(request)
            self._requests.abort(request.key, "handed over")

    def _has_begun(self, request: Request) -> bool:
        """Whether blocks belong to it, or did."""
        if self._imports.get(request.key) is not None:
            return True
        return any(s.block_table or s.num_computed_tokens > 0 for s in request.running.values())

    def on_room(self) -> None:
        self._room.update()
        self._host.loop.wake()

    def reap(self) -> None:
        self._exporter.reap()
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
            exports=self._exporter.exports.num_open,
            requests=len(self._requests),
            pending_blocks=sum(
                request.num_missing_blocks
                for request in self._requests
                if not self._has_begun(request)
            ),
            prefill_s_per_token=self._local_meter.s_per_token,
            held_blocks=sum(
                request.num_missing_blocks
                for request in self._requests
                if self._room.is_waiting(request.key)
            ),
        )


def _is_last(update: SequenceUpdate) -> bool:
    return update.finish_reason is not None
