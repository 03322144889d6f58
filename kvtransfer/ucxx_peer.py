"""Reader side of the ucxx transport: one peer, and the line of reads from it.

It is confined to the transport's one thread and never waits: `advance` does what can be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.v1 import kv_transfer_pb2
from kvtransfer.base import MemoryRegion
from kvtransfer.pulls import ThreadPull, pull_fault
from kvtransfer.send_receive import block_views, parse, region_view
from kvtransfer.ucxx_channel import Channel
from kvtransfer.ucxx_worker import UcxxWorker


@dataclass(frozen=True)
class Reading:
    """What all peers share: the pool that they are read into, UCX, and tags for messages."""

    region: MemoryRegion
    worker: UcxxWorker
    tags: Iterator[int]


@dataclass(frozen=True)
class GivenUpRead:
    """A read whose connection was closed, and whose bytes may land until the channel is over."""

    pull: ThreadPull
    channel: Channel
    failure: str | None


class UcxxPeer:
    """Reads blocks of `descriptor`, one pull after the other.

    An aborted pull costs the connection, since what was asked for would otherwise still come;
    the next pull connects again. Any other failure leaves the peer unusable.
    """

    def __init__(
        self,
        descriptor: kv_transfer_pb2.TransportDescriptor,
        address: str,
        reading: Reading,
        on_given_up: Callable[[GivenUpRead], None],
    ) -> None:
        """`address` is the numeric one of the descriptor's host."""
        self.has_failed = False
        self.is_usable = False
        """Whether it has once answered under its name, and not failed since."""
        self._descriptor = descriptor
        self._address = address
        self._reading = reading
        self._memory = region_view(reading.region)
        self._on_given_up = on_given_up
        self._channel: Channel | None = None
        self._is_greeted = False
        self._waiting: deque[ThreadPull] = deque()
        self._active: ThreadPull | None = None

    def pull(self, pull: ThreadPull) -> None:
        """Puts a read into the line; one without copies is done once the peer has answered."""
        fault = pull_fault(pull, self._descriptor.num_blocks, self._reading.region)
        if fault is None:
            self._waiting.append(pull)
        else:
            pull.settle(fault)

    def abort(self, pull: ThreadPull) -> None:
        """Settles a read that has not begun; gives up the one that has."""
        if pull in self._waiting:
            self._waiting.remove(pull)
            pull.settle()
        elif pull is self._active:
            self._drop_channel(None)

    def fail(self, failure: str) -> None:
        """Gives everything up; the peer cannot be used any more."""
        self.has_failed = True
        self.is_usable = False
        self._drop_channel(failure)
        while self._waiting:
            self._waiting.popleft().settle(failure)

    def advance(self) -> None:
        """Connects, says hello, begins and ends reads, as far as it goes now."""
        if self.has_failed:
            return
        try:
            self._advance()
        except ConnectionError as error:
            self.fail(f"{self._descriptor.agent}: {error}")

    def _advance(self) -> None:
        if self._channel is None and not self._waiting:
            return
        channel = self._channel or self._open()
        if self._active is not None and channel.blocks.have_succeeded():
            self._active.settle()
            self._active = None
        channel.check()
        self._is_greeted = self._is_greeted or self._has_answered(channel)
        while self._is_greeted and self._active is None and self._waiting:
            self._begin(channel, self._waiting.popleft())

    def _open(self) -> Channel:
        channel = self._reading.worker.connect(self._address, self._descriptor.port)
        self._channel = channel
        channel.send(kv_transfer_pb2.KvHello(agent=self._descriptor.agent))
        return channel

    def _has_answered(self, channel: Channel) -> bool:
        received = channel.receive()
        if received is None:
            return False
        hello = parse(kv_transfer_pb2.KvHello, received)
        if hello.agent != self._descriptor.agent:
            raise ConnectionError(f"it is {hello.agent}")
        self.is_usable = True
        return True

    def _begin(self, channel: Channel, pull: ThreadPull) -> None:
        if not pull.copies:
            pull.settle()
            return
        self._active = pull
        tag = next(self._reading.tags)
        destinations = [copy.destination for copy in pull.copies]
        block_bytes = self._descriptor.block_bytes
        channel.receive_blocks(block_views(self._memory, destinations, block_bytes, pull.part), tag)
        channel.send(
            kv_transfer_pb2.KvRead(
                block_ids=[copy.source for copy in pull.copies],
                offset=pull.part.offset,
                num_bytes=pull.part.num_bytes,
                tag=tag,
            )
        )

    def _drop_channel(self, failure: str | None) -> None:
        """Closes the connection, if there is one; without `failure` because of an abort."""
        channel, self._channel = self._channel, None
        self._is_greeted = False
        if channel is None:
            return
        self._reading.worker.close_channel(channel)
        pull, self._active = self._active, None
        if pull is not None:
            if failure is not None:
                pull.fail(failure)
            self._on_given_up(GivenUpRead(pull, channel, failure))
