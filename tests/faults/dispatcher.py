"""Sends dispatches to workers as a router does, for what a real router would never send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import BatonError, from_detail, from_exception
from tests.faults.control import WAIT_S, eventually
from tests.faults.stack import FaultStack

ROUTER_ID = "a-test"


class Dispatcher:
    """A router of its own, attached to every worker of the stack while the context lasts."""

    def __init__(self, stack: FaultStack) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self.addresses: dict[str, worker_pb2.WorkerAddress] = {}
        self.errors: dict[tuple[str, int], BatonError] = {}
        for name in stack.workers:
            status = stack.worker_status(name)
            self.addresses[name] = worker_pb2.WorkerAddress(
                worker_id=name, address=status.address, epoch=status.epoch
            )
            self._channels[name] = grpc.insecure_channel(status.address)

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
        for channel in self._channels.values():
            channel.close()

    def _read(self, name: str, attached: threading.Event) -> None:
        request = worker_pb2.AttachRequest(router_id=ROUTER_ID, epoch=self.addresses[name].epoch)
        try:
            for message in worker_pb2_grpc.WorkerStub(self._channels[name]).Attach(request):
                attached.set()
                for output in message.outputs:
                    if output.HasField("error"):
                        key = (output.request_id, output.attempt)
                        self.errors[key] = from_detail(output.error)
        except (grpc.RpcError, ValueError):
            return  # the worker or this router has left

    def decode(self, dispatch: worker_pb2.Dispatch, prefill: str, decode: str) -> None:
        """Raises what decode answers."""
        request = worker_pb2.DecodeRequest(dispatch=dispatch, prefill=self.addresses[prefill])
        with _own_errors():
            worker_pb2_grpc.DecodeStub(self._channels[decode]).Decode(request, timeout=WAIT_S)

    def prefill(self, dispatch: worker_pb2.Dispatch, prefill: str, decode: str) -> None:
        """Raises what prefill answers."""
        request = worker_pb2.PrefillRequest(dispatch=dispatch, decode=self.addresses[decode])
        with _own_errors():
            worker_pb2_grpc.PrefillStub(self._channels[prefill]).Prefill(request, timeout=WAIT_S)

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
    defaults = {"attempt": 1, "router_id": ROUTER_ID, "sampling": sampling}
    return worker_pb2.Dispatch(
        request_id=request_id, prompt_token_ids=prompt, **{**defaults, **fields}
    )


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_exception(error) from None
