"""`python -m tests.faults.worker SOCKET ROLE …`: a real worker with fault points around it.

The product's own code runs unchanged; its parts are wrapped from outside before they are put
together. Points: queued, step, output (for a router), report (of load, to a router), pull:* (see
transport.py), and those of each message (see messages.py).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from typing import Any

import grpc

import kvtransfer.peers
import worker.main
from core.rpc import CHANNEL_OPTIONS
from decode_svc.service import DecodeService
from engine.runner import ModelRunner
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.select import make_transport
from prefill_svc.gate import Gate, Ticket
from prefill_svc.service import PrefillService
from tests.faults.messages import FaultyCalls
from tests.faults.points import FaultPoints
from tests.faults.transport import FaultyTransport
from worker.outputs import OutputHub

SERVICES: dict[str, worker.main.ServiceFactory] = {
    "prefill_svc": PrefillService,
    "decode_svc": DecodeService,
}


def wrap_transport(faults: FaultPoints) -> None:
    def make(name: str, agent: str, region: MemoryRegion, host: str) -> Transport:
        return FaultyTransport(make_transport(name, agent, region, host), region, faults)

    worker.main.make_transport = make  # type: ignore[attr-defined]


def wrap_messages(faults: FaultPoints) -> None:
    def open_channel(address: str, tls: Any = None) -> grpc.aio.Channel:
        calls = [FaultyCalls(faults)]
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=calls)

    kvtransfer.peers.open_channel = open_channel  # type: ignore[attr-defined]


def wrap_queue(faults: FaultPoints) -> None:
    enter = Gate.enter

    async def enter_later(gate: Gate, ticket: Ticket) -> None:
        await faults.at("queued")
        await enter(gate, ticket)

    Gate.enter = enter_later  # type: ignore[method-assign]


def wrap_steps(faults: FaultPoints) -> None:
    execute = ModelRunner.execute

    def execute_later(runner: ModelRunner, *args: Any) -> Any:
        if faults.at_blocking("step") == "fail":
            raise RuntimeError("a fault: the device is lost")
        return execute(runner, *args)

    ModelRunner.execute = execute_later  # type: ignore[method-assign]


def wrap_outputs(faults: FaultPoints) -> None:
    publish = OutputHub.publish

    def publish_or_not(hub: OutputHub, router_id: str, output: Any) -> None:
        action = faults.at_blocking("output")
        if action != "drop":
            publish(hub, router_id, output)
        if action == "duplicate":
            publish(hub, router_id, output)

    publish_token = OutputHub.publish_token

    def publish_token_or_not(hub: OutputHub, dispatch: Any, token: Any) -> None:
        action = faults.at_blocking("output")
        if action != "drop":
            publish_token(hub, dispatch, token)
        if action == "duplicate":
            publish_token(hub, dispatch, token)

    OutputHub.publish = publish_or_not  # type: ignore[method-assign]
    OutputHub.publish_token = publish_token_or_not  # type: ignore[method-assign]


def wrap_reports(faults: FaultPoints) -> None:
    attach = OutputHub.attach

    async def attach_without_reports(hub: OutputHub, router_id: str) -> AsyncGenerator[Any, None]:
        async for message in attach(hub, router_id):
            if faults.at_blocking("report") == "drop":
                message.ClearField("load")
            yield message

    OutputHub.attach = attach_without_reports  # type: ignore[method-assign]


def main() -> int:
    socket_path, prog, *sys.argv[1:] = sys.argv[1:]
    faults = FaultPoints(socket_path)
    wrap_transport(faults)
    wrap_messages(faults)
    wrap_queue(faults)
    wrap_steps(faults)
    wrap_outputs(faults)
    wrap_reports(faults)
    return worker.main.run(prog, SERVICES[prog])


if __name__ == "__main__":
    sys.exit(main())
