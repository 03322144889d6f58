"""The prefill side of one hand-off: the grant, the announcements, the end."""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import kv_transfer_pb2, types_pb2
from core.errors import (
    BatonError,
    HandOffGivenUp,
    InternalError,
    Unavailable,
    Unreachable,
    from_exception,
    to_detail,
)
from core.logs import event
from core.rpc import pod_errors
from kvtransfer.digests import DigestPlan
from kvtransfer.exports import ExportTable
from kvtransfer.link import LinkEstimate
from prefill_svc.progress import Piece, Pieces
from prefill_svc.prompt import Prompt
from worker.convert import logprobs_to_proto
from worker.first_tokens import FirstToken, first_outputs, prompt_outputs
from worker.host import WorkerHost

logger = logging.getLogger(__name__)


class HandOff:
    """Speaks with decode about prompts whose blocks the export table holds."""

    def __init__(self, host: WorkerHost, exports: ExportTable) -> None:
        self._host = host
        self._exports = exports
        self._block_bytes = host.engine.kv_cache.block_bytes
        self._num_layers = host.engine.model_config.num_layers

    async def ask_for_grant(self, prompt: Prompt) -> kv_transfer_pb2.GrantReply:
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
        prompt.asked_at = self._host.clock()
        with pod_errors(peer.worker_id):
            grant: kv_transfer_pb2.GrantReply = await peer.imports.Grant(request, timeout=timeout_s)
        prompt.asked_at = None
        prompt.phase.event("granted")
        prompt.link = LinkEstimate(grant.link_bytes_per_s, grant.link_overhead_s)
        return grant

    async def announce(self, prompt: Prompt, grant: kv_transfer_pb2.GrantReply) -> None:
        """Announces blocks as they become final, the first tokens with the last of them."""
        plan = DigestPlan(grant.digest_every, grant.digest_offset)
        pieces = Pieces(grant.num_held_blocks, self._num_layers, self._block_bytes)
        while True:
            progress = await prompt.progress.get()
            if progress.error is not None:
                raise progress.error
            firsts = progress.first_tokens
            if firsts and prompt.wants_logprobs:
                await self._publish(prompt, firsts)
            if firsts and all(first.finish_reason is not None for first in firsts):
                self._exports.revoke(prompt.key)
                self._host.tasks.start(self.revoke_at_decode(prompt, None))
                return
            piece = pieces.due(progress)
            if piece is None:
                continue
            news = await self._announcement(prompt, piece, plan)
            if firsts:
                news.first_tokens.extend(_first_tokens(firsts))
                news.is_last = True
                if not self._exports.announced(prompt.key):
                    raise HandOffGivenUp("decode gave the hand-off up")
            await self._tell(prompt, news)
            if news.is_last:
                return

    async def _tell(self, prompt: Prompt, news: kv_transfer_pb2.AnnounceRequest) -> None:
        """Raises unless decode has heard it: it says so, or has already released everything."""
        assert prompt.peer is not None
        try:
            await prompt.peer.tell(prompt.peer.imports.Announce, news)
        except Unreachable:
            if not prompt.is_released:
                raise

    async def _publish(self, prompt: Prompt, firsts: tuple[FirstToken, ...]) -> None:
        """Sends the router the prompt's log-probabilities and then the first tokens.

        Not between steps, as first tokens alone: so many messages take their time.
        """
        outputs = await asyncio.to_thread(prompt_outputs, prompt.sequence, prompt.logprobs)
        for output in [*outputs, *first_outputs(prompt.sequence, firsts)]:
            self._host.hub.publish(prompt.dispatch.router_id, output)

    async def _announcement(
        self, prompt: Prompt, piece: Piece, plan: DigestPlan
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

    async def revoke_at_decode(self, prompt: Prompt, error: BaseException | None) -> None:
        assert prompt.peer is not None
        request = kv_transfer_pb2.RevokeRequest(
            request_id=prompt.key[0],
            attempt=prompt.key[1],
            prefill_epoch=self._host.identity.epoch,
        )
        if error is not None:
            request.error.CopyFrom(_reason(error))
        try:
            await prompt.peer.tell(prompt.peer.imports.Revoke, request)
        except BatonError as failure:
            event(logger, logging.DEBUG, "revoke_failed", error=failure)


def _first_tokens(firsts: tuple[FirstToken, ...]) -> list[kv_transfer_pb2.FirstToken]:
    """Those of the choices that go on, for decode."""
    return [
        kv_transfer_pb2.FirstToken(
            choice=first.choice,
            token_id=first.token.token_id,
            logprobs=logprobs_to_proto(first.token.logprobs) if first.token.logprobs else None,
        )
        for first in firsts
        if first.finish_reason is None
    ]


def _reason(error: BaseException) -> types_pb2.ErrorDetail:
    if isinstance(error, asyncio.CancelledError):
        return to_detail(Unavailable("prefill gave the request up"))
    if isinstance(error, Exception):
        return to_detail(from_exception(error))
    return to_detail(InternalError(type(error).__name__))
