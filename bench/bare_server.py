"""The least that a server of token streams costs: `python -m bench.bare_server grpc|sse`.

It computes nothing, knows no router, and sends every client the same prepared token, at once
and then each step, as a router's streams look on the wire. What it spends is spent by the kernel
and, for gRPC, by grpc.aio, which most servers in Python use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import uvloop

from baton.v1 import inference_pb2, inference_pb2_grpc

_REQUEST_ID = "0123456789abcdef0123456789abcdef"
_TEXT = " quick"
_EVENT = (
    b"data: "
    + json.dumps(
        {
            "id": f"cmpl-{_REQUEST_ID}",
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": "mock",
            "choices": [{"index": 0, "text": _TEXT, "logprobs": None, "finish_reason": None}],
        }
    ).encode()
    + b"\n\n"
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"data: [DONE]\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Steps:
    """Calls everybody who wants to be called once a step."""

    def __init__(self) -> None:
        self.wanted: list[Callable[[], None]] = []

    async def run(self, step_s: float) -> None:
        due = time.perf_counter()
        while True:
            due += step_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            for call in list(self.wanted):
                call()


class GrpcServer(inference_pb2_grpc.InferenceServicer):
    """Generates the same token again and again."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        step = asyncio.Event()
        self._steps.wanted.append(step.set)
        try:
            for index in range(request.sampling.max_tokens):
                if index:
                    await step.wait()
                    step.clear()
                message = inference_pb2.GenerateResponse(
                    request_id=_REQUEST_ID, text=_TEXT, token_ids=(1,), output_index=index
                )
                await context.write(message)
        finally:
            self._steps.wanted.remove(step.set)


class SseConnection(asyncio.Protocol):
    """One client: sends its body in one piece, and one request at a time."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""
        self._num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        _, _, body = self._received.partition(b"\r\n\r\n")
        if not body.endswith(b"}"):
            return
        self._received = b""
        self._num_left = json.loads(body)["max_tokens"]
        self._transport.write(_HEAD)
        self._steps.wanted.append(self._step)
        self._step()

    def connection_lost(self, error: Exception | None) -> None:
        if self._num_left:
            self._steps.wanted.remove(self._step)

    def _step(self) -> None:
        self._transport.write(_chunk(_EVENT))
        self._num_left -= 1
        if self._num_left == 0:
            self._steps.wanted.remove(self._step)
            self._transport.write(_chunk(_DONE) + b"0\r\n\r\n")


async def run(kind: str, step_s: float) -> None:
    steps = Steps()
    if kind == "grpc":
        server = grpc.aio.server()
        servicer = GrpcServer(steps)  # type: ignore[abstract]
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    else:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: SseConnection(steps), "127.0.0.1", 0)
        address = "http://{}:{}".format(*listener.sockets[0].getsockname())
    sys.stdout.write(f"ready address={address}\n")
    sys.stdout.flush()
    await steps.run(step_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["grpc", "sse"])
    parser.add_argument("--step-ms", type=float, required=True)
    arguments = parser.parse_args()
    uvloop.run(run(arguments.kind, arguments.step_ms / 1e3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
