"""Both sides of the ucxx transport, confined to the one thread that `ucxx_transport` gives it.

UCX's calls are not made to be shared, and ucxx's own progress threads are many times slower;
so one thread of ours sleeps until UCX has work, and `tick` does it.
"""

from __future__ import annotations

import itertools

from baton.v1 import kv_transfer_pb2
from kvtransfer.base import MemoryRegion
from kvtransfer.pulls import ThreadPull
from kvtransfer.ucxx_owner import UcxxOwner
from kvtransfer.ucxx_peer import GivenUpRead, Reading, UcxxPeer
from kvtransfer.ucxx_worker import UcxxWorker


class UcxxAgent:
    """One pool, served to readers and read into. `is_usable` may be called from any thread."""

    def __init__(self, name: str, region: MemoryRegion, host: str) -> None:
        self.port = 0
        self._name = name
        self._region = region
        self._host = host
        self._worker: UcxxWorker | None = None
        self._owner: UcxxOwner | None = None
        self._peers: dict[str, UcxxPeer] = {}
        self._given_up: list[GivenUpRead] = []
        self._tags = itertools.count(1)

    def open(self) -> int:
        """Begins to serve; the file descriptor that tells when to `tick`. Raises StartupError."""
        worker = UcxxWorker(self._region.memory, self._host)
        self._owner = UcxxOwner(self._name, self._region, worker)
        self.port = worker.listen(self._owner.accept)
        self._worker = worker
        return worker.fd

    def close(self) -> None:
        """Frees everything; no read may be in flight."""
        worker, self._worker, self._owner = self._worker, None, None
        self._peers.clear()
        if worker is not None:
            worker.close()

    def is_usable(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.is_usable

    def connect(
        self, descriptor: kv_transfer_pb2.TransportDescriptor, address: str, greeting: ThreadPull
    ) -> None:
        """Makes the peer known, if it is not; `greeting`, a read of nothing, ends when it has
        answered."""
        peer = self._peers.get(descriptor.agent)
        if peer is None or peer.has_failed:
            assert self._worker is not None
            reading = Reading(self._region, self._worker, self._tags)
            peer = UcxxPeer(descriptor, address, reading, self._given_up.append)
            self._peers[descriptor.agent] = peer
        peer.pull(greeting)

    def pull(self, pull: ThreadPull) -> None:
        """Puts a read into its peer's line."""
        peer = self._peers.get(pull.agent)
        if peer is None or not peer.is_usable:
            pull.settle(f"{pull.agent} is not connected")
        else:
            peer.pull(pull)

    def abort(self, pull: ThreadPull) -> None:
        peer = self._peers.get(pull.agent)
        if peer is not None:
            peer.abort(pull)

    def disconnect(self, name: str) -> None:
        """Forgets the peer and fails its reads."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.fail(f"{name}: disconnected")

    def tick(self) -> float | None:
        """Moves everything on; returns how soon it must run again, None when UCX will tell."""
        if self._worker is None or self._owner is None:
            return None
        self._worker.progress()
        self._owner.advance()
        for peer in self._peers.values():
            peer.advance()
        self._settle_given_up()
        return self._worker.pause_s()

    def _settle_given_up(self) -> None:
        landing = []
        for read in self._given_up:
            if read.channel.blocks.are_over():
                read.pull.settle(read.failure)
            else:
                landing.append(read)
        self._given_up[:] = landing
