"""What a worker sends to routers: one message per engine step and router.

Each attached router has a buffer that collects outputs until its stream takes them, so a
slow router costs memory up to a bound and never holds up a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from core.logs import event

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
MAX_BUFFERED_OUTPUTS = 100_000


class _Stream:
    """The buffer behind one Attach call."""

    def __init__(self) -> None:
        self.outputs: list[worker_pb2.SequenceOutput] = []
        self.changed = asyncio.Event()
        self.is_closed = False


class OutputHub:
    """Outputs by router."""

    def __init__(
        self,
        report: Callable[[], tuple[types_pb2.Load, types_pb2.WorkerState.ValueType]],
        on_router_lost: Callable[[str], None],
    ) -> None:
        self._report = report
        self._on_router_lost = on_router_lost
        self._streams: dict[str, _Stream] = {}

    def require(self, router_id: str) -> None:
        """Raises Unavailable when this router could not receive anything."""
        if router_id not in self._streams:
            raise Unavailable(f"router {router_id} is not attached to this worker")

    def publish(self, router_id: str, output: worker_pb2.SequenceOutput) -> None:
        """Buffers one output; dropped when the router has left.

        A router that does not read its stream counts as one that has left.
        """
        stream = self._streams.get(router_id)
        if stream is None:
            return
        if len(stream.outputs) >= MAX_BUFFERED_OUTPUTS:
            event(logger, logging.ERROR, "router_does_not_read", router_id=router_id)
            stream.outputs = []
            self._drop(router_id, stream)
            return
        stream.outputs.append(output)
        stream.changed.set()

    async def attach(self, router_id: str) -> AsyncGenerator[worker_pb2.WorkerMessage, None]:
        """The stream of one router; an older one of the same router ends.

        When the worker ends it, its state is the last that the router hears.
        """
        old = self._streams.get(router_id)
        if old is not None:
            self._drop(router_id, old)
        stream = self._streams[router_id] = _Stream()
        try:
            while not stream.is_closed:
                yield self._message(stream)
                await _wait(stream.changed, REPORT_INTERVAL_S)
            yield self._message(stream)
            while stream.outputs:
                yield self._message(stream)
        finally:
            self._drop(router_id, stream)

    def _message(self, stream: _Stream) -> worker_pb2.WorkerMessage:
        load, state = self._report()
        outputs = stream.outputs
        # One with a prompt's log-probabilities is large, so it is the last of its message.
        end = next((i + 1 for i, output in enumerate(outputs) if output.prompt_logprobs), None)
        outputs, stream.outputs = outputs[:end], [] if end is None else outputs[end:]
        if not stream.outputs:
            stream.changed.clear()
        return worker_pb2.WorkerMessage(outputs=outputs, load=load, state=state)

    def _drop(self, router_id: str, stream: _Stream) -> None:
        stream.is_closed = True
        stream.changed.set()
        if self._streams.get(router_id) is stream:
            del self._streams[router_id]
            self._on_router_lost(router_id)

    def report(self) -> None:
        """Tells every router load and state now."""
        for stream in self._streams.values():
            stream.changed.set()

    def close(self) -> None:
        """Ends every stream."""
        for router_id, stream in list(self._streams.items()):
            self._drop(router_id, stream)


async def _wait(changed: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await changed.wait()
    except TimeoutError:
        return
