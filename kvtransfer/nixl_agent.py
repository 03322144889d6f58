"""The NIXL agent: every call to it, confined to the one thread that `nixl_transport` gives it.

NIXL's default thread mode does not synchronize, and its own progress thread burns a core when
idle; so the agent has none, and `tick` makes progress as often as someone needs it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError, TransferError
from kvtransfer.base import BlockPart, MemoryRegion
from kvtransfer.nixl_library import load_nixl
from kvtransfer.pulls import ThreadPull, check_peer, pull_fault

READ_TICK_S = 0.0003
"""While an own read runs: how late its end may be noticed."""
EXPORT_TICK_S = 0.001
"""While peers may be reading: a read over TCP needs the owner's help."""
IDLE_TICK_S = 0.05
"""Once peers know this end: a read that outlives its export, or that makes the first use of a
connection after it, needs the owner's help to end at all, and until then its destination is
quarantined."""
WARM_UP_TICKS = 200
"""Export ticks in which both ends wire up a new connection.

It saves the first read about 10 ms. And it has to be over before the reader goes away: UCX
on the owner's side connects back, and has been seen to crash when nobody is there any more.
"""


@dataclass
class _Peer:
    """A peer's pool and the line of reads from it, of which one at a time is in flight.

    Two large reads at once over TCP take longer than one after the other.
    """

    name: str
    region: MemoryRegion
    has_failed: bool = False
    is_leaving: bool = False
    waiting: deque[ThreadPull] = field(default_factory=deque)
    active: ThreadPull | None = None
    handles: list[Any] = field(default_factory=list)
    """NIXL's handles for the active read: both ends' block lists and, last, the operation."""

    @property
    def is_usable(self) -> bool:
        return not self.has_failed and not self.is_leaving


class NixlAgent:
    """One agent with one registered region. `is_usable` may be called from any thread."""

    def __init__(self, name: str, region: MemoryRegion, host: str) -> None:
        self.metadata = b""
        self.num_exports = 0
        self._name = name
        self._region = region
        self._host = host
        self._agent: Any = None
        self._registration: Any = None
        self._peers: dict[str, _Peer] = {}
        self._num_warm_up_ticks = 0
        self._is_known = False

    def open(self) -> None:
        """Makes the agent and registers the region. Raises StartupError."""
        region = self._region
        nixl = load_nixl(region.memory, self._host)
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False)
            self._agent = nixl.nixl_agent(self._name, config)
            whole = [(region.address, region.num_bytes, region.device_id, "")]
            self._registration = self._agent.register_memory(whole, region.memory)
            self.metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise StartupError(f"transport nixl: {error}") from error

    def close(self) -> None:
        """Frees everything, once new connections are wired up; no read may be in flight."""
        while self._num_warm_up_ticks > 0:
            self.tick()
            time.sleep(EXPORT_TICK_S)
        self.num_exports = 0
        self._is_known = False
        for peer in list(self._peers.values()):
            self._remove(peer)
        self._agent.deregister_memory(self._registration)
        self._agent = None

    def is_usable(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.is_usable

    def connect(self, descriptor: kv_transfer_pb2.TransportDescriptor) -> None:
        """Loads the peer; one that was leaving stays. Raises TransferError."""
        known = self._peers.get(descriptor.agent)
        if known is not None and not known.has_failed:
            known.is_leaving = False
            return
        if known is not None:
            self._remove(known)
        check_peer("nixl", self._region, descriptor)
        try:
            self._peers[descriptor.agent] = self._load(descriptor)
        except Exception as error:
            raise TransferError(f"cannot connect to {descriptor.agent}: {error}") from error
        self._warm_up()

    def expect_reader(self) -> None:
        """A peer is about to connect to this end."""
        self._is_known = True
        self._warm_up()

    def _warm_up(self) -> None:
        """Helps a connection that is about to be made."""
        self._num_warm_up_ticks = WARM_UP_TICKS

    def disconnect(self, name: str) -> None:
        """Fails the peer's reads; `tick` forgets it once nothing is in flight."""
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.is_leaving = True
        self._fail_waiting(peer, f"{name} was disconnected")
        if peer.active is not None:
            peer.active.fail(f"{name} was disconnected")

    def pull(self, pull: ThreadPull) -> None:
        """Puts a read into its peer's line."""
        peer = self._peers.get(pull.agent)
        if peer is None or not peer.is_usable:
            pull.settle(f"{pull.agent} is not connected")
            return
        fault = pull_fault(pull, peer.region.num_blocks, self._region)
        if fault is not None or not pull.copies:
            pull.settle(fault)
            return
        peer.waiting.append(pull)
        self._start_next(peer)

    def abort(self, pull: ThreadPull) -> None:
        """Settles a read that has not begun; one that has begun settles when it ends.

        Releasing NIXL's handle early would not stop the bytes, only the news of them.
        """
        peer = self._peers.get(pull.agent)
        if peer is not None and pull in peer.waiting:
            peer.waiting.remove(pull)
            pull.settle()

    def tick(self) -> float | None:
        """Moves everything on; returns how soon it must run again, None when it need not."""
        for peer in list(self._peers.values()):
            self._poll(peer)
            if peer.is_leaving and peer.active is None and self._num_warm_up_ticks == 0:
                self._remove(peer)
        is_reading = any(peer.active is not None for peer in self._peers.values())
        if self.num_exports > 0 or self._num_warm_up_ticks > 0:
            self._num_warm_up_ticks = max(0, self._num_warm_up_ticks - 1)
            self._agent.get_new_notifs()
            return READ_TICK_S if is_reading else EXPORT_TICK_S
        if is_reading:
            return READ_TICK_S
        if not self._is_known:
            return None
        self._agent.get_new_notifs()
        return IDLE_TICK_S

    def _prepare(self, agent: str, pool: MemoryRegion, part: BlockPart) -> Any:
        """A list with this part of every block: (address, bytes, device, stride, count).

        NIXL keeps it in this form, so making one takes microseconds however large the pool is.
        """
        address = pool.address + part.offset
        strided = [[address, part.num_bytes, pool.device_id, pool.block_bytes, pool.num_blocks]]
        return self._agent.prep_xfer_dlist(agent, np.array(strided, np.uint64), pool.memory)

    def _load(self, descriptor: kv_transfer_pb2.TransportDescriptor) -> _Peer:
        name = self._agent.add_remote_agent(descriptor.metadata).decode()
        if name != descriptor.agent:
            if name not in self._peers:
                self._agent.remove_remote_agent(name)
            raise TransferError(f"its metadata belong to {name}")
        region = MemoryRegion(
            descriptor.base_address,
            descriptor.num_blocks,
            descriptor.block_bytes,
            descriptor.memory,
            descriptor.device_id,
        )
        return _Peer(name, region)

    def _start_next(self, peer: _Peer) -> None:
        while peer.active is None and peer.waiting:
            peer.active = peer.waiting.popleft()
            try:
                state = self._issue(peer, peer.active)
            except Exception as error:
                self._finish(peer, str(error))
                return
            self._note(peer, state)

    def _issue(self, peer: _Peer, pull: ThreadPull) -> str:
        """Hands a read to NIXL and returns its state."""
        own_blocks = self._prepare("", self._region, pull.part)
        peer.handles.append(own_blocks)
        peer_blocks = self._prepare(peer.name, peer.region, pull.part)
        peer.handles.append(peer_blocks)
        sources = [copy.source for copy in pull.copies]
        destinations = [copy.destination for copy in pull.copies]
        operation = self._agent.make_prepped_xfer(
            "READ", own_blocks, destinations, peer_blocks, sources
        )
        peer.handles.append(operation)
        return str(self._agent.transfer(operation))

    def _poll(self, peer: _Peer) -> None:
        if peer.active is None:
            return
        try:
            state = self._agent.check_xfer_state(peer.handles[-1])
        except Exception as error:
            self._finish(peer, str(error))
            return
        self._note(peer, state)
        self._start_next(peer)

    def _note(self, peer: _Peer, state: str) -> None:
        if state == "DONE":
            self._finish(peer, None)
        elif state == "ERR":
            self._finish(peer, "the operation failed")

    def _finish(self, peer: _Peer, failure: str | None) -> None:
        """The active read is over. A failed one leaves the connection unusable."""
        pull = peer.active
        assert pull is not None
        peer.active = None
        while peer.handles:
            # A refused release after a failure is NIXL's to repeat: its handle does so itself.
            with contextlib.suppress(Exception):
                peer.handles.pop().release()
        if failure is not None:
            failure = f"reading from {peer.name}: {failure}"
            peer.has_failed = True
            self._fail_waiting(peer, failure)
        pull.settle(failure)

    def _fail_waiting(self, peer: _Peer, failure: str) -> None:
        while peer.waiting:
            peer.waiting.popleft().settle(failure)

    def _remove(self, peer: _Peer) -> None:
        del self._peers[peer.name]
        self._agent.remove_remote_agent(peer.name)
