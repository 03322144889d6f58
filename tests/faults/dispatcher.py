"""Sends dispatches to workers as a router does, for what a real router would never send."""

from __future__ import annotations

import itertools
import queue
import threading
from types import TracebackType
from typing import Any, Self

import grpc

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import BatonError, from_detail
from tests.faults.control import WAIT_S, eventually
from tests.faults.stack import FaultStack

ROUTER_ID = "a-test"
_stream_ids = itertools.count(1)


class Dispatcher:
    """A router of its own, attached to every worker of the stack while the context lasts."""

    def __init__(self, stack: FaultStack) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self.addresses: dict[str, worker_pb2.WorkerAddress] = {}
        self.errors: dict[tuple[str, int], BatonError] = {}
        self._accepted: set[int] = set()
        """By stream id."""
        self._outgoing: dict[str, queue.SimpleQueue[worker_pb2.RouterMessage | None]] = {}
        for name in stack.workers:
            status = stack.worker_status(name)
            self.addresses[name] = worker_pb2.WorkerAddress(
                worker_id=name, address=status.address, epoch=status.epoch
            )
            self._channels[name] = grpc.insecure_channel(status.address)
            self._outgoing[name] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        attached = [threading.Event() for _ in self._channels]
        for name, event in zip(self._channels, attached, strict=True):
            threading.Thread(target=self._read, args=(name, event), daemon=True).start()
        for event in attached:
            assert event.wait(WAIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        for channel in self._channels.values():
            channel.close()

    def _read(self, name: str, attached: threading.Event) -> None:
        attach = worker_pb2.AttachRequest(router_id=ROUTER_ID, epoch=self.addresses[name].epoch)
        self._outgoing[name].put(worker_pb2.RouterMessage(attach=attach))
        messages = iter(self._outgoing[name].get, None)
        try:
            for message in worker_pb2_grpc.WorkerStub(self._channels[name]).Attach(messages):
                attached.set()
                self._accepted.update(message.accepted)
                for output in message.outputs:
                    if output.HasField("error"):
                        key = (output.request_id, output.attempt)
                        self.errors[key] = from_detail(output.error)
        except (grpc.RpcError, ValueError):
            return  # the worker or this router has left

    def decode(self, dispatch: worker_pb2.Dispatch, prefill: str, decode: str) -> None:
        """Raises what decode refuses with."""
        key = (dispatch.request_id, dispatch.attempt)
        self._assign(decode, dispatch, prefill)
        number = dispatch.stream_id
        assert eventually(lambda: number in self._accepted or key in self.errors, WAIT_S)
        if number not in self._accepted:
            raise self.errors.pop(key)

    def prefill(self, dispatch: worker_pb2.Dispatch, prefill: str, decode: str) -> None:
        """Without waiting; `error_of` tells what becomes of it."""
        self._assign(prefill, dispatch, decode)

    def abort(self, request_id: str, attempt: int = 1) -> None:
        """Tells every worker to drop a request; returns when all have heard it."""
        request = worker_pb2.AbortRequest(request_id=request_id, attempt=attempt)
        for name, outgoing in self._outgoing.items():
            outgoing.put(worker_pb2.RouterMessage(aborts=[request]))
            # A worker takes what it is told in order, and refuses this.
            nothing = make_dispatch([], f"after {request_id} on {name}")
            self._assign(name, nothing, name)
            self.error_of(nothing, WAIT_S)

    def _assign(self, to: str, dispatch: worker_pb2.Dispatch, partner: str) -> None:
        assignment = worker_pb2.Assignment(dispatch=dispatch, partner=self.addresses[partner])
        self._outgoing[to].put(worker_pb2.RouterMessage(assignments=[assignment]))

    def error_of(self, dispatch: worker_pb2.Dispatch, timeout_s: float) -> BatonError:
        """What a worker reports of it on the stream."""
        key = (dispatch.request_id, dispatch.attempt)
        assert eventually(lambda: key in self.errors, timeout_s), f"nothing about {key}"
        return self.errors[key]


def make_dispatch(prompt: list[int], request_id: str, **fields: Any) -> worker_pb2.Dispatch:
    """A greedy dispatch; `fields` override."""
    sampling = types_pb2.SamplingParams(
        max_tokens=8, top_p=1.0, repetition_penalty=1.0, temperature=0.0
    )
    defaults = {
        "attempt": 1,
        "router_id": ROUTER_ID,
        "sampling": sampling,
        "stream_id": next(_stream_ids),
    }
    return worker_pb2.Dispatch(
        request_id=request_id, prompt_token_ids=prompt, **{**defaults, **fields}
    )
