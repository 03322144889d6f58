"""The decode side of one hand-off: prefill asks for room, announces blocks, or gives up.

What is announced goes to the request, whose own task reads it (`decode_svc.reader`).
"""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import kv_transfer_pb2, types_pb2
from core.errors import HandOffGivenUp, Unavailable
from core.logs import event
from decode_svc.choices import check_first_tokens
from decode_svc.request import News, Request
from decode_svc.room import Room
from kvtransfer.base import BlockPart
from kvtransfer.imports import Announcement, ImportKey, ImportTable
from worker.host import WorkerHost
from worker.requests import RequestTable

logger = logging.getLogger(__name__)

_DISPATCH_WAIT_S = 10.0
"""For a dispatch that prefill knows already: decode may have to connect to prefill first."""
_ENDED_WAITING = "the request ended while it waited for room"


class HandOff:
    """An ImportPolicy: answers prefill about requests that are to be read from it."""

    def __init__(
        self,
        host: WorkerHost,
        imports: ImportTable,
        room: Room,
        requests: RequestTable[Request],
    ) -> None:
        self._host = host
        self._imports = imports
        self._room = room
        self._requests = requests

    async def grant(
        self, key: ImportKey, prefill_epoch: int, decode_epoch: int
    ) -> kv_transfer_pb2.GrantReply:
        if decode_epoch != self._host.identity.epoch:
            raise Unavailable("decode has restarted since the dispatch")
        # The router tells both workers at once, and prefill may be the first to hear.
        await self._requests.arrived(key, _DISPATCH_WAIT_S)
        request = self._require(key)
        if request.peer.epoch != prefill_epoch:
            raise Unavailable("prefill has restarted since the dispatch")
        try:
            await self._room.take(request.prompt, request.num_choices)
        except asyncio.CancelledError:
            if self._requests.get(key) is request:
                raise
            raise HandOffGivenUp(_ENDED_WAITING) from None
        entry = self._imports.get(key)
        if entry is None:
            raise HandOffGivenUp(_ENDED_WAITING)
        request.span.event("room_granted", {"baton.held_blocks": len(entry.held)})
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
        state = self._requests.get(key)
        if state is not None and request.is_last:
            check_first_tokens(request.first_tokens, state.num_choices)
        part = None
        if request.part_bytes:
            part = BlockPart(request.part_offset, request.part_bytes)
        news = Announcement(
            request.sequence, request.first_block, request.block_ids, request.is_last, part
        )
        copies = self._imports.announce(key, news)
        if copies is not None:
            self._require(key).news.put_nowait(News(copies, part, request))

    def revoke(
        self, key: ImportKey, prefill_epoch: int, error: types_pb2.ErrorDetail | None
    ) -> None:
        request = self._requests.get(key)
        if request is None or request.prefill is None or request.prefill.epoch != prefill_epoch:
            return
        if error is not None:
            event(logger, logging.INFO, "prefill_gave_up", request_id=key[0], code=error.code)
        # The router hears of a failure from prefill itself.
        request.is_released = True
        self._requests.abort(key, "prefill gave up" if error else "the first tokens were the last")

    def _require(self, key: ImportKey) -> Request:
        request = self._requests.get(key)
        if request is None or request.prefill is None:
            # What decode has told the router of it, a refusal perhaps, counts.
            raise HandOffGivenUp(f"{key[0]} attempt {key[1]} is not known here")
        return request
