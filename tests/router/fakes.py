"""Workers that follow a script, over real gRPC: no engine, no KV, the same protocol."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import BatonError, to_detail
from core.registry import Registry
from core.rpc import RpcServer
from core.tasks import TaskSet
from tests.model_folder import MODEL_DIGEST

FINGERPRINT = types_pb2.Fingerprint(
    model=MODEL_DIGEST,
    dtype="float32",
    layout="l",
    block_size=4,
    block_bytes=64,
    hash_seed="s",
)
HEARTBEAT_S = 0.1


@dataclass
class Script:
    """What the workers of a test answer: `reply` to every prompt, ended by an end token.

    Of several choices, number i leaves out the first i tokens of it.
    """

    reply: list[int]
    num_decode_tokens: int = 1000
    """Decode stops sending after so many tokens of its own; `fault` happens then."""
    fault: BatonError | None = None
    """Reported by decode at that point, in the first `num_faults` attempts; None: it hangs."""
    num_faults: int = 1000
    preempts: bool = False
    """Decode preempts the sequence there instead of reporting a fault."""
    decode_first: bool = False
    """Decode's messages are sent before prefill's."""
    decodes: dict[str, FakeWorker] = field(default_factory=dict)


_Said = worker_pb2.SequenceOutput | worker_pb2.StepTokens | int
"""What one message tells; a number is the stream id of a dispatch that was accepted."""


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One worker. Records what it is told in `dispatches` and `aborts`."""

    def __init__(self, worker_id: str, role: types_pb2.Role.ValueType, script: Script) -> None:
        self.record = types_pb2.WorkerRecord(
            worker_id=worker_id,
            role=role,
            epoch=1,
            state=types_pb2.WORKER_STATE_READY,
            fingerprint=FINGERPRINT,
            max_model_len=128,
        )
        self.script = script
        self.load = types_pb2.Load(blocks=types_pb2.BlockStats(total=100, free=100))
        self.refusal: BatonError | None = None
        self.is_silent = False
        self.is_asked_for_status = asyncio.Event()
        self.may_tell_status = asyncio.Event()
        self.may_tell_status.set()
        self.dispatches: list[worker_pb2.Dispatch] = []
        self.aborts: list[tuple[str, int]] = []
        self._outboxes: dict[str, asyncio.Queue[_Said]] = {}
        self._told: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        """By request and attempt: set when the router has told this worker of it."""
        self._server: RpcServer | None = None
        self._tasks = TaskSet()

    async def start(self, registry: Registry) -> None:
        self._server = RpcServer("127.0.0.1", 0)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server.grpc_server)
        self.record.address = await self._server.start([])
        if self.record.role == types_pb2.ROLE_DECODE:
            self.script.decodes[self.record.address] = self
        await registry.publish(self.record)

    async def stop(self) -> None:
        """Like a killed process: connections break."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
            await self._tasks.cancel(1)

    async def Attach(self, requests, context) -> AsyncIterator[worker_pb2.WorkerMessage]:
        router_id = (await anext(requests)).attach.router_id
        outbox = self._outboxes[router_id] = asyncio.Queue()
        self._tasks.start(self._read(requests))
        yield worker_pb2.WorkerMessage(load=self.load, state=self.record.state)
        while True:
            try:
                # Not around the yield: time that the stream takes is no silence.
                async with asyncio.timeout(HEARTBEAT_S):
                    output = await outbox.get()
            except TimeoutError:
                if not self.is_silent:
                    yield worker_pb2.WorkerMessage(load=self.load, state=self.record.state)
            else:
                if isinstance(output, int):
                    yield worker_pb2.WorkerMessage(
                        load=self.load, state=self.record.state, accepted=[output]
                    )
                elif isinstance(output, worker_pb2.StepTokens):
                    yield worker_pb2.WorkerMessage(tokens=output)
                else:
                    yield worker_pb2.WorkerMessage(outputs=[output])

    async def _read(self, requests) -> None:
        async for message in requests:
            for assignment in message.assignments:
                self._accept(assignment)
            self.aborts += [(abort.request_id, abort.attempt) for abort in message.aborts]

    async def GetWorkerStatus(self, request, context) -> worker_pb2.WorkerStatus:
        self.is_asked_for_status.set()
        await self.may_tell_status.wait()
        audit = worker_pb2.Audit(ok=True) if request.audit else None
        return worker_pb2.WorkerStatus(
            id=self.record.worker_id, state=self.record.state, load=self.load, audit=audit
        )

    def _accept(self, assignment: worker_pb2.Assignment) -> None:
        dispatch = assignment.dispatch
        self._told[dispatch.request_id, dispatch.attempt].set()
        if self.refusal is not None:
            self.send(dispatch, worker_pb2.SequenceOutput(error=to_detail(self.refusal)))
            return
        self.dispatches.append(dispatch)
        self._outboxes[dispatch.router_id].put_nowait(dispatch.stream_id)
        if self.record.role == types_pb2.ROLE_PREFILL:
            decode = self.script.decodes[assignment.partner.address]
            self._tasks.start(self._play(dispatch, decode))
        elif not assignment.HasField("partner"):
            self.play_local(dispatch)

    async def _play(self, dispatch: worker_pb2.Dispatch, decode: FakeWorker) -> None:
        if dispatch.HasField("prompt_logprobs") and len(dispatch.prompt_token_ids) > 1:
            scored = dispatch.prompt_token_ids[1:]
            logprobs = [script_logprobs(item, dispatch.prompt_logprobs) for item in scored]
            self.send(dispatch, worker_pb2.SequenceOutput(prompt_logprobs=logprobs))
        for choice in range(dispatch.n):
            await self._play_choice(dispatch, decode, choice)

    async def _play_choice(
        self, dispatch: worker_pb2.Dispatch, decode: FakeWorker, choice: int
    ) -> None:
        first = len(dispatch.output_token_ids)
        hello = self.script_output(dispatch, first, choice, cached_tokens=4)
        if not self.script.decode_first or hello.finish_reason:
            self.send(dispatch, hello)
        if not hello.finish_reason:
            await decode.has_been_told(dispatch)
            decode.play_decode(dispatch, first, choice)
        if self.script.decode_first:
            await asyncio.sleep(0.05)
            self.send(dispatch, hello)

    async def has_been_told(self, dispatch: worker_pb2.Dispatch) -> None:
        """Returns when the router's own word of `dispatch` is here: prefill's may come before."""
        await self._told[dispatch.request_id, dispatch.attempt].wait()

    def play_local(self, dispatch: worker_pb2.Dispatch) -> None:
        """Sends all tokens, as who has computed the prompt itself."""
        self.play_decode(dispatch, len(dispatch.output_token_ids), 0, cached_tokens=4)

    def play_decode(
        self, dispatch: worker_pb2.Dispatch, first: int, choice: int, **fields: int
    ) -> None:
        """Sends the token at `first` again and all that follow it, unless it refuses everything."""
        if self.refusal is not None:
            return
        script = self.script
        is_faulty = dispatch.attempt <= script.num_faults
        for index in range(first, len(script.reply) - choice):
            if is_faulty and index - first > script.num_decode_tokens:
                if script.preempts:
                    self.send(dispatch, worker_pb2.SequenceOutput(preempted=True))
                elif script.fault is not None:
                    output = worker_pb2.SequenceOutput(error=to_detail(script.fault))
                    self.send(dispatch, output)
                return
            given = fields or {"transferred_blocks": 3}
            output = self.script_output(dispatch, index, choice, **given)
            if index > first and not (output.finish_reason or output.logprobs):
                self._send_plain(dispatch, output)
                continue
            self.send(dispatch, output)
            if output.finish_reason:
                return

    def script_output(
        self, dispatch: worker_pb2.Dispatch, index: int, choice: int = 0, **fields: int
    ) -> worker_pb2.SequenceOutput:
        token_id = self.script.reply[choice:][index]
        logprobs = None
        if dispatch.sampling.HasField("logprobs"):
            logprobs = [script_logprobs(token_id, dispatch.sampling.logprobs)]
        reason = types_pb2.FINISH_REASON_UNSPECIFIED
        if token_id in dispatch.eos_token_ids:
            reason = types_pb2.FINISH_REASON_STOP
        elif index + 1 == dispatch.sampling.max_tokens:
            reason = types_pb2.FINISH_REASON_LENGTH
        return worker_pb2.SequenceOutput(
            output_index=index,
            token_ids=[token_id],
            finish_reason=reason,
            logprobs=logprobs,
            choice=choice,
            **fields,
        )

    def send(self, dispatch: worker_pb2.Dispatch, output: worker_pb2.SequenceOutput) -> None:
        output.request_id, output.attempt = dispatch.request_id, dispatch.attempt
        self._outboxes[dispatch.router_id].put_nowait(output)

    def _send_plain(self, dispatch: worker_pb2.Dispatch, output: worker_pb2.SequenceOutput) -> None:
        """As decode says all but a sequence's first and last token."""
        tokens = worker_pb2.StepTokens(
            stream_ids=[dispatch.stream_id + output.choice],
            output_indexes=[output.output_index],
            token_ids=output.token_ids,
        )
        self._outboxes[dispatch.router_id].put_nowait(tokens)


def script_logprobs(token_id: int, num_top: int) -> types_pb2.TokenLogprobs:
    """The token itself with -0.25, then the ids after it, each a half less likely."""
    top = [
        types_pb2.TokenLogprob(token_id=(token_id + step) % 256, logprob=-0.25 - 0.5 * step)
        for step in range(num_top)
    ]
    return types_pb2.TokenLogprobs(logprob=-0.25, top=top)
