"""One prompt's way through a prefill worker.

    gate → grant from decode, prefix from another worker → engine
         → announce blocks as they become final → lease

The first token of each choice goes to the router at once. The blocks stay pinned by the export
until decode has released it or its lease is over; the request's task ends with the last
announcement.
"""

from __future__ import annotations

import dataclasses

import grpc

from baton.v1 import (
    kv_transfer_pb2,
    types_pb2,
    worker_pb2,
)
from core.errors import (
    HandOffGivenUp,
    Unavailable,
)
from core.hashing import block_hashes
from engine.batch import ScheduledSequence, SequenceUpdate, StepBatch
from engine.sequence import Sequence
from kvtransfer.exports import ExportKey
from kvtransfer.link import LinkEstimate
from prefill_svc.gate import Gate, Ticket
from prefill_svc.hand_off import HandOff
from prefill_svc.overlap import Chunk, layer_boundaries
from prefill_svc.prefix_fetch import PrefixFetcher
from prefill_svc.progress import Progress
from prefill_svc.prompt import Prompt
from worker.compute_meter import ComputeMeter
from worker.convert import prompt_from_dispatch
from worker.exporter import Exporter
from worker.first_tokens import first_outputs, first_tokens
from worker.host import WorkerHost
from worker.prefix_reader import PrefixReader
from worker.requests import RequestKey, RequestTable
from worker.role import RoleService
from worker.spans import dispatch_span

QUICK_GRANT_S = 0.1
"""A grant that takes longer waits for room."""
STEPS_AHEAD = 2
"""Steps' worth of prompts that may hold a grant before they are computed."""


class PrefillService(RoleService):
    """Policy of a prefill worker; the engine and the export table are its mechanism."""

    role = types_pb2.ROLE_PREFILL
    grpc_services = ("baton.v1.KvExport",)

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        pool = host.engine.pool
        self._exporter = Exporter(host, self._on_released)
        self._exports = self._exporter.exports
        self._gate = Gate(
            max_tokens_ahead=STEPS_AHEAD * host.settings.max_num_batched_tokens,
            max_pinned_blocks=int(host.settings.max_export_share * pool.num_blocks),
            num_pinned=lambda: self._exports.num_pinned_blocks,
        )
        self._block_size = pool.block_size
        self._block_bytes = host.engine.kv_cache.block_bytes
        self._num_layers = host.engine.model_config.num_layers
        self._compute_meter = ComputeMeter()
        self._prefix_reader = PrefixReader(host, self.on_room)
        self._prefixes = PrefixFetcher(host, self._prefix_reader, self._compute_meter.expected_s)
        self._hand_off = HandOff(host, self._exports)
        self._requests: RequestTable[Prompt] = RequestTable(host.hub, host.tasks, host.clock)

    def add_to_server(self, server: grpc.aio.Server) -> None:
        self._exporter.add_to_server(server)

    async def accept(self, assignment: worker_pb2.Assignment) -> None:
        """Queues one prompt."""
        dispatch, decode = assignment.dispatch, assignment.partner
        self._host.require_ready()
        self._host.hub.require(dispatch.router_id)
        sequence = prompt_from_dispatch(
            dispatch, self._host.identity.fingerprint, self._host.engine.max_model_len
        )
        sampling = sequence.sampling
        num_outputs = len(sequence.output_token_ids)
        sequence.sampling = dataclasses.replace(sampling, max_tokens=num_outputs + 1)
        num_blocks = -(-sequence.num_tokens // self._host.engine.pool.block_size)
        tokens = sequence.token_slice(0, sequence.num_tokens)
        sequence.block_hashes = block_hashes(tokens, self._block_size, sequence.scope)
        num_uncached = self._num_uncached(sequence)
        ticket = Ticket(decode.worker_id, sequence.num_tokens, num_blocks)
        span = dispatch_span(self._host.tracer, "prefill", dispatch)
        prompt = Prompt(dispatch, decode, sequence, sampling, ticket, num_uncached, span)
        # With log-probabilities of its own, a prompt is computed whole.
        if assignment.HasField("source") and not prompt.wants_logprobs:
            prompt.source = assignment.source
        self._requests.start(dispatch, prompt, self._serve)

    def _num_uncached(self, sequence: Sequence) -> int:
        size = self._block_size
        # The newest token is computed in any case.
        reusable = sequence.block_hashes[: (sequence.num_tokens - 1) // size]
        return sequence.num_tokens - self._host.engine.pool.match_length(reusable) * size

    async def _serve(self, prompt: Prompt) -> None:
        key = prompt.key
        prompt.phase = prompt.span.child("prefill.queue")
        try:
            await self._gate.enter(prompt.ticket)
            prompt.phase.event("turn")
            grant = await self._prepare(prompt)
            self._exports.open(key, prompt.span.child("prefill.export"))
            self._exporter.note_opened()
            self._host.loop.add(prompt.sequence)
            await self._hand_off.announce(prompt, grant)
        except BaseException as error:
            prompt.phase.end(error)
            self._exports.revoke(key)
            if prompt.is_known_to_decode and not prompt.is_released:
                self._host.tasks.start(self._hand_off.revoke_at_decode(prompt, error))
            raise
        finally:
            self._host.loop.abort(prompt.sequence.key)
            self._gate.leave(prompt.ticket)

    async def _prepare(self, prompt: Prompt) -> kv_transfer_pb2.GrantReply:
        """Waits until decode has room, and meanwhile for what another worker has of the prompt."""
        if prompt.source is None:
            return await self._hand_off.ask_for_grant(prompt)
        fetching = self._host.tasks.start(self._fetch_prefix(prompt, prompt.source))
        try:
            grant = await self._hand_off.ask_for_grant(prompt)
            await fetching
        finally:
            fetching.cancel()
        return grant

    async def _fetch_prefix(self, prompt: Prompt, source: worker_pb2.PrefixSource) -> None:
        told = {"baton.prefix_source": source.worker.worker_id}
        with prompt.span.child("prefill.prefix_fetch", told, is_call=True) as span:
            await self._prefixes.bring(prompt.sequence, source)
            num_uncached = self._num_uncached(prompt.sequence)
            span.set({"baton.fetched_tokens": prompt.num_uncached - num_uncached})
            prompt.num_uncached = num_uncached

    # StepObserver: on the event loop, between steps

    def on_scheduled(self, batch: StepBatch) -> frozenset[int]:
        """Pins a prompt's blocks for its export as soon as the scheduler has allocated them.

        Returns where to cut the step's layers, so that their transfer hides behind it.
        """
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.request_key)
            if prompt is not None and not prompt.block_ids:
                prompt.block_ids = list(item.sequence.block_table)
                prompt.begin_compute()
                self._exports.pin(prompt.key, prompt.block_ids)
                self._gate.leave(prompt.ticket)
        return self._layer_boundaries(batch)

    def _layer_boundaries(self, batch: StepBatch) -> frozenset[int]:
        if not self._host.settings.kv_overlap:
            return frozenset()
        num_blocks = 0
        links: list[LinkEstimate] = []
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.request_key)
            if prompt is not None and prompt.link is not None:
                num_blocks += self._final_after(item, prompt) - item.start // self._block_size
                links.append(prompt.link)
        if not links:
            return frozenset()
        compute_s = self._compute_meter.expected_s(batch.num_tokens)
        chunk = Chunk(self._num_layers, num_blocks * self._block_bytes, compute_s)
        return layer_boundaries(chunk, min(links, key=lambda link: link.bytes_per_s))

    def _final_after(self, item: ScheduledSequence, prompt: Prompt) -> int:
        """How many leading blocks do not change any more after this step."""
        if item.samples:
            return len(prompt.block_ids)
        return (item.start + item.num_tokens) // self._block_size

    def on_layers(self, batch: StepBatch, num_layers: int) -> None:
        """Lets the requests' tasks announce what the step has finished so far."""
        for item in batch.sequences:
            prompt = self._requests.get(item.sequence.request_key)
            if prompt is not None:
                prompt.progress.put(Progress(self._final_after(item, prompt), num_layers))

    def on_preempted(self, sequences: list[Sequence]) -> None:
        """Does not happen: a prompt has all its blocks from its start on."""

    def on_updates(self, updates: list[SequenceUpdate], batch: StepBatch, elapsed_s: float) -> None:
        """Sends first tokens to routers and wakes the requests' tasks."""
        self._compute_meter.observe(batch.num_tokens, elapsed_s)
        for update in updates:
            sequence = update.sequence
            prompt = self._requests.get(sequence.request_key)
            if prompt is None:
                continue
            prompt.logprobs += update.prompt_logprobs
            firsts = first_tokens(update, prompt.sampling, self._host.engine.max_model_len)
            if not prompt.wants_logprobs:
                for output in first_outputs(sequence, firsts):
                    self._host.hub.publish(prompt.dispatch.router_id, output)
            end = sequence.num_computed_tokens // self._block_size
            prompt.phase.event("chunk", {"baton.computed_tokens": sequence.num_computed_tokens})
            if firsts:
                prompt.phase.end()
                prompt.span.event("first_token")
                end = len(prompt.block_ids)
                # All but the one that was just sampled.
                self._host.counters.num_prefix_queries += prompt.sequence.num_tokens - 1
                self._host.counters.num_prefix_hits += prompt.sequence.num_cached_tokens
            prompt.progress.put(Progress(end, self._num_layers, firsts))

    def on_failed(self, sequence: Sequence, error: Exception) -> None:
        prompt = self._requests.get(sequence.request_key)
        if prompt is not None:
            prompt.progress.put(Progress(0, 0, error=error))

    # RoleService

    def abort(self, key: RequestKey) -> None:
        self._exports.revoke(key)
        self._requests.abort(key)

    def abort_choice(self, key: RequestKey, choice: int) -> None:
        """Nothing to do: a choice is decode's alone."""

    def abort_router(self, router_id: str) -> None:
        # Announced exports go on: decode, which the router also left, gives them up.
        self._requests.abort_router(router_id)

    def _on_released(self, key: ExportKey, lease_held: bool) -> None:
        prompt = self._requests.get(key)
        if prompt is not None and lease_held:
            prompt.is_released = True
        elif prompt is not None and not prompt.is_released:
            # Not silently: the revocation that follows may reach decode before decode has
            # told the router why.
            self._requests.fail(key, HandOffGivenUp("decode gave the hand-off up"))
        self.on_room()

    def on_room(self) -> None:
        self._gate.update()
        self._host.loop.wake()

    def reap(self) -> None:
        for export in self._exporter.reap():
            self._requests.fail(export.key, Unavailable("the hand-off's lease is over"))
        self._requests.forget_old()
        self.on_room()

    def load(self) -> types_pb2.Load:
        scheduler = self._host.engine.scheduler
        ungranted, behind = self._held_up()
        return types_pb2.Load(
            queue_depth=self._gate.num_waiting + scheduler.num_waiting,
            queued_tokens=sum(prompt.num_remaining for prompt in self._requests),
            running=scheduler.num_running,
            exports=self._exports.num_open,
            imports=self._prefix_reader.num_open,
            requests=len(self._requests),
            prefill_s_per_token=self._compute_meter.s_per_token,
            held_requests=len(behind),
            held_tokens=sum(prompt.num_remaining for prompt in ungranted + behind),
            held_blocks=sum(prompt.ticket.num_blocks for prompt in behind),
        )

    def _held_up(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts that wait for room on decode, and those behind them at the gate."""
        slow = self._host.clock() - QUICK_GRANT_S
        ungranted = [
            prompt
            for prompt in self._requests
            if prompt.asked_at is not None and prompt.asked_at < slow
        ]
        full = {prompt.decode.worker_id for prompt in ungranted}
        behind = [
            prompt
            for prompt in self._requests
            if prompt.decode.worker_id in full and not prompt.ticket.entered.is_set()
        ]
        return ungranted, behind
