"""The default transport: one-sided reads through NIXL over UCX.

This is the event loop's side; `NixlAgent` does the work on a thread of its own. Which of
cuda_ipc, RDMA, shared memory (CMA) or TCP a pair of pods gets is UCX's choice.

Where only TCP is left the `tcp` transport is the better one: it is no slower, and UCX over TCP
aborts the owner's process once in some fifty times that a reader is killed in mid-read
("ucp_request.inl: Fatal: unexpected error: Endpoint timeout", NIXL 1.5.1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.v1 import kv_transfer_pb2
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion, Pull, Transport
from kvtransfer.job_thread import JobThread
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.pulls import ThreadPull


class NixlTransport(Transport):
    """`agent` names this pod and its epoch; `host` is the address that peers reach it at.

    A read of a stalled peer neither ends nor settles until the peer moves or dies: callers
    keep deadlines for `done` and leave the blocks alone until `settled`.
    """

    name = "nixl"

    def __init__(self, agent: str, region: MemoryRegion, host: str) -> None:
        self._agent_name = agent
        self._region = region
        self._agent = NixlAgent(agent, region, host)
        self._thread = JobThread("kv-nixl", self._agent.tick)
        self._pulls: set[ThreadPull] = set()

    async def start(self) -> None:
        self._thread.start()
        try:
            await self._thread.call(self._agent.open)
        except BaseException:
            await self._thread.stop()
            raise

    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        # Whoever asks hands it to a peer that connects at once.
        self._thread.post(self._agent.expect_reader)
        return kv_transfer_pb2.TransportDescriptor(
            transport=self.name,
            agent=self._agent_name,
            metadata=self._agent.metadata,
            base_address=self._region.address,
            block_bytes=self._region.block_bytes,
            num_blocks=self._region.num_blocks,
            device_id=self._region.device_id,
            memory=self._region.memory,
        )

    async def connect(self, peer: kv_transfer_pb2.TransportDescriptor) -> None:
        await self._thread.call(partial(self._agent.connect, peer))

    def is_connected(self, agent: str) -> bool:
        return self._agent.is_usable(agent)

    def pull(self, agent: str, copies: Sequence[BlockCopy], part: BlockPart | None = None) -> Pull:
        part = part or self._region.whole_block
        pull = ThreadPull(agent, tuple(copies), part, self._request_abort, self._pulls.discard)
        self._pulls.add(pull)
        if self._thread.is_running:
            self._thread.post(partial(self._agent.pull, pull))
        else:
            pull.settle("the transport does not run")
        return pull

    def set_num_exports(self, num_exports: int) -> None:
        self._thread.post(partial(setattr, self._agent, "num_exports", num_exports))

    async def disconnect(self, agent: str) -> None:
        await self._thread.call(partial(self._agent.disconnect, agent))

    async def close(self) -> None:
        if not self._thread.is_running:
            return
        for pull in tuple(self._pulls):
            pull.abort()
        await asyncio.gather(*(pull.settled() for pull in tuple(self._pulls)))
        await self._thread.call(self._agent.close)
        await self._thread.stop()

    def _request_abort(self, pull: ThreadPull) -> None:
        self._thread.post(partial(self._agent.abort, pull))
