"""The router's line to one worker: the Attach stream, and what it has told us.

The stream is the heartbeat: a worker whose stream is alive lives, whatever Redis says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import BatonError, Unavailable
from core.logs import event
from core.rpc import open_channel
from core.tls import Tls
from router.grpc_client.connect import open_call
from router.grpc_client.status import CallFailed
from router.predicted_load import PredictedLoad
from router.routing import Work

logger = logging.getLogger(__name__)

DispatchKey = tuple[str, int]
"""(request id as workers know it, attempt)."""
_ATTACH = "/baton.v1.Worker/Attach"
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_TOKENS_AT_ONCE = 128
_OUTPUTS_AT_ONCE = 8
"""Between so many of a message others have their turn: they take about a millisecond."""


class OutputSink(Protocol):
    """Takes what a worker says about one dispatch. Must not raise."""

    def on_output(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        """New tokens, the end, or an error."""

    def on_lost(self, link: WorkerLink, error: BatonError) -> None:
        """The worker cannot be reached; nothing more will come from it."""


TakeToken = Callable[[int, int, float], None]
"""Takes one token of one sequence: output index, token id, and when (`time.monotonic`)."""


class WorkerLink:
    """One worker in one life (epoch). `run` holds the stream open until cancelled."""

    def __init__(
        self,
        record: types_pb2.WorkerRecord,
        router_id: str,
        silence_s: float,
        on_change: Callable[[], None],
        on_load: Callable[[str, types_pb2.Load], None],
        tls: Tls | None = None,
    ) -> None:
        self.record = record
        self.state: types_pb2.WorkerState.ValueType = record.state
        self.load: types_pb2.Load | None = None
        self.load_at = 0.0
        self.lost_at = time.monotonic()
        self.is_attached = False
        self._router_id = router_id
        self._silence_s = silence_s
        self._on_change = on_change
        self._on_load = on_load
        self._sinks: dict[DispatchKey, OutputSink] = {}
        self._token_takers: dict[int, TakeToken] = {}
        """By stream id."""
        self.predicted = PredictedLoad()
        self._tls = tls
        self._outgoing = _Outgoing(_drop)
        self._channel: grpc.aio.Channel | None = None
        self._is_let_go = False

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def is_ready(self) -> bool:
        """Whether new requests may go there."""
        return self.is_attached and self.state == types_pb2.WORKER_STATE_READY

    @property
    def address(self) -> worker_pb2.WorkerAddress:
        """As the other worker of a pair needs it."""
        return worker_pb2.WorkerAddress(
            worker_id=self.worker_id, address=self.record.address, epoch=self.epoch
        )

    @property
    def worker(self) -> worker_pb2_grpc.WorkerAsyncStub:
        """For calls beside the stream, which are rare: its channel is opened by the first.

        Raises Unavailable when the router has let go of the worker.
        """
        if self._is_let_go:
            raise Unavailable(f"the router has let go of {self.worker_id}")
        if self._channel is None:
            self._channel = open_channel(self.record.address, self._tls)
        return worker_pb2_grpc.WorkerStub(self._channel)

    def prefix(self, num_blocks: int) -> worker_pb2.PrefixSource:
        """As a prefill worker needs it that may fetch so many leading blocks from this one."""
        return worker_pb2.PrefixSource(worker=self.address, num_blocks=num_blocks)

    def fresh_load(self, max_age_s: float) -> types_pb2.Load | None:
        """The last report, or None when it is older than `max_age_s`."""
        is_fresh = self.load_at > 0 and time.monotonic() - self.load_at <= max_age_s
        return self.load if is_fresh else None

    def subscribe(self, dispatch: worker_pb2.Dispatch, sink: OutputSink, work: Work) -> None:
        """Outputs of `dispatch` go to `sink` until `unsubscribe`.

        `work` is what it adds to the worker's load as long as no report can tell.
        """
        self._sinks[_key_of(dispatch)] = sink
        self.predicted.add(dispatch.stream_id, work)

    def assign(
        self,
        dispatch: worker_pb2.Dispatch,
        partner: WorkerLink | None,
        source: worker_pb2.PrefixSource | None = None,
    ) -> None:
        """Tells the worker to do its part in a dispatch. Raises Unavailable when it is away.

        What becomes of it, a refusal too, comes to the sink of the dispatch.
        """
        if not self.is_attached:
            raise Unavailable(f"worker {self.worker_id} is not attached")
        self._outgoing.message.assignments.add(
            dispatch=dispatch,
            partner=None if partner is None else partner.address,
            source=source,
        )

    def abort(self, key: DispatchKey, choice: int | None = None) -> None:
        """Tells the worker to drop a dispatch, or one choice of it.

        Without a stream to it there is nothing to tell: it has dropped everything.
        """
        if self.is_attached:
            self._outgoing.message.aborts.add(request_id=key[0], attempt=key[1], choice=choice)

    def take_tokens(self, stream_id: int, take: TakeToken) -> None:
        """Single tokens of sequence `stream_id` go to `take`, which must not raise."""
        self._token_takers[stream_id] = take

    def leave_tokens(self, stream_id: int) -> None:
        """Nobody takes tokens of `stream_id` any more; a no-op when nobody did."""
        self._token_takers.pop(stream_id, None)

    def unsubscribe(self, dispatch: worker_pb2.Dispatch) -> None:
        """Forgets it; a no-op when it is not known."""
        self._sinks.pop(_key_of(dispatch), None)
        self.predicted.remove(dispatch.stream_id)

    async def run(self) -> None:
        """Attaches, and attaches again when the stream is lost, until cancelled."""
        backoff_s = _MIN_BACKOFF_S
        try:
            while True:
                reason = await self._read_stream()
                if self.is_attached:
                    backoff_s = _MIN_BACKOFF_S
                self._lost(reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._lost("the router let go of it", logging.INFO)
            self._is_let_go = True
            if self._channel is not None:
                await self._channel.close(None)

    async def _read_stream(self) -> str:
        """Holds one Attach stream to its end and says why it ended."""
        silence_s = self._silence_s
        try:
            async with open_call(self.record.address, _ATTACH, self._tls, silence_s) as call:
                outgoing = self._outgoing = _Outgoing(call.send)
                outgoing.message.attach.router_id = self._router_id
                outgoing.message.attach.epoch = self.epoch
                while (message := await call.read(silence_s)) is not None:
                    await self._receive(worker_pb2.WorkerMessage.FromString(message))
            return "the worker ended the stream"
        except TimeoutError:
            return f"silent for {silence_s:g} s"
        except CallFailed as failure:
            return str(failure)
        except Exception as error:
            # A bug here must not cost the router this worker for good.
            logger.exception("what %s says cannot be used", self.worker_id)
            return f"{type(error).__name__}: {error}"

    async def _receive(self, message: worker_pb2.WorkerMessage) -> None:
        is_news = not self.is_attached
        if is_news:
            self.is_attached = True
            event(logger, logging.INFO, "worker_attached", worker_id=self.worker_id)
        if message.HasField("load"):
            self.load, self.load_at = message.load, time.monotonic()
            self.predicted.reported(message.accepted)
            self._on_load(self.worker_id, message.load)
        if message.state and message.state != self.state:
            self.state = message.state
            is_news = True
        if is_news:
            self._on_change()
        if message.HasField("tokens"):
            await self._receive_tokens(message.tokens)
        for index, output in enumerate(message.outputs, 1):
            sink = self._sinks.get((output.request_id, output.attempt))
            if sink is not None:
                sink.on_output(self, output)
            if index % _OUTPUTS_AT_ONCE == 0:
                # Requests that begin or end together do not keep other streams waiting.
                await asyncio.sleep(0)

    async def _receive_tokens(self, tokens: worker_pb2.StepTokens) -> None:
        """A step's tokens: this and what it calls run for every token of every stream."""
        now = time.monotonic()
        takers = self._token_takers
        num_tokens = len(tokens.token_ids)
        if not len(tokens.stream_ids) == len(tokens.output_indexes) == num_tokens:
            raise ValueError("the columns of a step's tokens are not of one length")
        for start in range(0, num_tokens, _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            # Slices are lists, which are faster to go through than what they are of.
            columns = tokens.stream_ids[part], tokens.output_indexes[part], tokens.token_ids[part]
            for stream_id, output_index, token_id in zip(*columns, strict=False):
                take = takers.get(stream_id)
                if take is not None:
                    take(output_index, token_id, now)
            if num_tokens - start >= _TOKENS_AT_ONCE:
                # Where many streams run, or steps have piled up, others have their turn.
                await asyncio.sleep(0)

    def _lost(self, reason: str, level: int = logging.WARNING) -> None:
        if self.is_attached:
            self.is_attached = False
            self.lost_at = time.monotonic()
            event(logger, level, "worker_lost", worker_id=self.worker_id, reason=reason)
            self._on_change()
        self.load = None
        self.load_at = 0.0
        error = Unavailable(f"worker {self.worker_id} cannot be reached: {reason}")
        for sink in list(self._sinks.values()):
            sink.on_lost(self, error)


def _key_of(dispatch: worker_pb2.Dispatch) -> DispatchKey:
    return dispatch.request_id, dispatch.attempt


class _Outgoing:
    """What one stream has to tell the worker; all that one turn of the loop adds is one message."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._message: worker_pb2.RouterMessage | None = None

    @property
    def message(self) -> worker_pb2.RouterMessage:
        """To be added to: it is sent when the turn ends."""
        if self._message is None:
            self._message = worker_pb2.RouterMessage()
            asyncio.get_running_loop().call_soon(self._leave, self._message)
        return self._message

    def _leave(self, message: worker_pb2.RouterMessage) -> None:
        self._message = None
        self._send(message.SerializeToString())


def _drop(message: bytes) -> None:
    """Where no stream has been opened yet."""
