"""What a worker sends to routers: one message per engine step and router.

Each carries a load report. A report that was made while requests ran would mislead until the next
one: a step's last outputs go out before what they held is free. So as long as the worker is
not idle by its last report, another one follows soon after the load has changed.

Each attached router has a buffer that collects outputs until its stream takes them, so a
slow router costs memory up to a bound and never holds up a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from core.logs import event

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
CHANGE_INTERVAL_S = 0.1
"""A change of load without outputs is told after so long."""
MAX_BUFFERED_OUTPUTS = 100_000


Report = tuple[types_pb2.Load, types_pb2.WorkerState.ValueType]


class PlainToken(NamedTuple):
    """A token of which nothing else is to be said: not a sequence's first, nor its last."""

    choice: int
    output_index: int
    token_id: int


class _Stream:
    """The buffer behind one Attach call. `tokens` are earlier than all `outputs`."""

    def __init__(self) -> None:
        self.tokens = _Tokens()
        self.outputs: list[worker_pb2.SequenceOutput] = []
        self.accepted: list[int] = []
        self.reported: Report | None = None
        """The last that was sent."""
        self.changed = asyncio.Event()
        self.is_closed = False

    @property
    def num_buffered(self) -> int:
        return len(self.outputs) + len(self.tokens.token_ids) + len(self.accepted)


class _Tokens:
    """The columns of a StepTokens."""

    def __init__(self) -> None:
        self.stream_ids: list[int] = []
        self.output_indexes: list[int] = []
        self.token_ids: list[int] = []

    def message(self) -> worker_pb2.StepTokens:
        return worker_pb2.StepTokens(
            stream_ids=self.stream_ids,
            output_indexes=self.output_indexes,
            token_ids=self.token_ids,
        )


class OutputHub:
    """Outputs by router."""

    def __init__(
        self,
        report: Callable[[], Report],
        on_router_lost: Callable[[str], None],
    ) -> None:
        self._report = report
        self._on_router_lost = on_router_lost
        self._streams: dict[str, _Stream] = {}
        self._idle: set[_Stream] = set()
        """Those of routers that take the worker for idle."""

    def require(self, router_id: str) -> None:
        """Raises Unavailable when this router could not receive anything."""
        if router_id not in self._streams:
            raise Unavailable(f"router {router_id} is not attached to this worker")

    def publish(self, router_id: str, output: worker_pb2.SequenceOutput) -> None:
        """Buffers one output; dropped when the router has left.

        A router that does not read its stream counts as one that has left.
        """
        stream = self._reading(router_id)
        if stream is not None:
            stream.outputs.append(output)
            self._wake(stream)

    def accepted(self, dispatch: worker_pb2.Dispatch) -> None:
        """Tells with the next report, which is not hurried, that an assignment was taken."""
        stream = self._reading(dispatch.router_id)
        if stream is not None:
            stream.accepted.append(dispatch.stream_id)
            self._wake_idle()

    def publish_token(self, dispatch: worker_pb2.Dispatch, token: PlainToken) -> None:
        """Buffers one token of a sequence that an output has spoken of before."""
        stream = self._reading(dispatch.router_id)
        if stream is None:
            return
        if stream.outputs:
            # The router has not taken them yet, and they may be of the same sequence.
            stream.outputs.append(
                worker_pb2.SequenceOutput(
                    request_id=dispatch.request_id,
                    attempt=dispatch.attempt,
                    choice=token.choice,
                    output_index=token.output_index,
                    token_ids=[token.token_id],
                )
            )
        else:
            tokens = stream.tokens
            tokens.stream_ids.append(dispatch.stream_id + token.choice)
            tokens.output_indexes.append(token.output_index)
            tokens.token_ids.append(token.token_id)
        self._wake(stream)

    def _wake(self, stream: _Stream) -> None:
        """Something is there for a router."""
        stream.changed.set()
        self._wake_idle()

    def _wake_idle(self) -> None:
        """Those that take this worker for idle hear that it is not."""
        if self._idle:
            for other in self._idle:
                other.changed.set()
            self._idle.clear()

    def _reading(self, router_id: str) -> _Stream | None:
        """The stream of a router that reads; one that does not is given up."""
        stream = self._streams.get(router_id)
        if stream is None:
            return None
        if stream.num_buffered >= MAX_BUFFERED_OUTPUTS:
            event(logger, logging.ERROR, "router_does_not_read", router_id=router_id)
            stream.outputs, stream.tokens, stream.accepted = [], _Tokens(), []
            self._drop(router_id, stream)
            return None
        return stream

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
                await self._news(stream)
            yield self._message(stream)
            while stream.outputs:
                yield self._message(stream)
        finally:
            self._drop(router_id, stream)

    def _message(self, stream: _Stream) -> worker_pb2.WorkerMessage:
        stream.reported = load, state = self._report()
        if not (load.requests or load.running or load.blocks.referenced):
            self._idle.add(stream)
        outputs = stream.outputs
        # One with a prompt's log-probabilities is large, so it is the last of its message.
        end = next((i + 1 for i, output in enumerate(outputs) if output.prompt_logprobs), None)
        outputs, stream.outputs = outputs[:end], [] if end is None else outputs[end:]
        if not stream.outputs:
            stream.changed.clear()
        message = worker_pb2.WorkerMessage(
            outputs=outputs, load=load, state=state, accepted=stream.accepted
        )
        stream.accepted = []
        if stream.tokens.token_ids:
            message.tokens.CopyFrom(stream.tokens.message())
            stream.tokens = _Tokens()
        return message

    async def _news(self, stream: _Stream) -> None:
        """Returns when there are outputs or another load, at the latest after a second."""
        clock = asyncio.get_running_loop().time
        until = clock() + REPORT_INTERVAL_S
        while not stream.changed.is_set() and (left_s := until - clock()) > 0:
            if stream in self._idle:
                await _wait(stream.changed, left_s)
                continue
            await _wait(stream.changed, min(left_s, CHANGE_INTERVAL_S))
            if stream.accepted or self._report() != stream.reported:
                return

    def _drop(self, router_id: str, stream: _Stream) -> None:
        self._idle.discard(stream)
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
