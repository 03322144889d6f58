"""Owner side of the ucxx transport: sends blocks of the own pool to readers that ask.

It is confined to the transport's one thread and never waits: `advance` does what can be done.
"""

from __future__ import annotations

import logging

from baton.v1 import kv_transfer_pb2
from core import logs
from kvtransfer.base import MemoryRegion
from kvtransfer.send_receive import block_views, parse, region_view, requested_part
from kvtransfer.ucxx_channel import Channel
from kvtransfer.ucxx_worker import UcxxWorker

logger = logging.getLogger(__name__)


class UcxxOwner:
    """Serves `region` under the name `agent`, which includes the epoch of this process."""

    def __init__(self, agent: str, region: MemoryRegion, worker: UcxxWorker) -> None:
        self._agent = agent
        self._region = region
        self._memory = region_view(region)
        self._worker = worker
        self._readers: dict[Channel, bool] = {}
        """Every connection, and whether its hello has come."""

    def accept(self, channel: Channel) -> None:
        """Takes a new connection."""
        self._readers[channel] = False

    def advance(self) -> None:
        """Answers whoever has asked; lets go of whoever has left or breaks the rules."""
        for channel in tuple(self._readers):
            try:
                channel.check()
                self._serve(channel)
            except ConnectionError as error:
                logs.event(logger, logging.INFO, "kv_reader_lost", error=error)
                del self._readers[channel]
                self._worker.close_channel(channel)

    def _serve(self, channel: Channel) -> None:
        while channel.blocks.are_over() and (received := channel.receive()) is not None:
            if self._readers[channel]:
                self._send(channel, parse(kv_transfer_pb2.KvRead, received))
                continue
            hello = parse(kv_transfer_pb2.KvHello, received)
            if hello.agent != self._agent:
                raise ConnectionError(f"a reader looked for {hello.agent!r} at {self._agent!r}")
            channel.send(kv_transfer_pb2.KvHello(agent=self._agent))
            self._readers[channel] = True

    def _send(self, channel: Channel, read: kv_transfer_pb2.KvRead) -> None:
        part = requested_part(read, self._region)
        blocks = block_views(self._memory, read.block_ids, self._region.block_bytes, part)
        channel.send_blocks(blocks, read.tag)
