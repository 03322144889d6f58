"""An OpenAI-compatible server that computes nothing: `python -m bench.openai_mock`.

It answers a completion with the asked number of chunks, the first at once and then one a
step, all streams together. It stands behind a proxy that is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys

from core.rpc import run_service, wait_for_stop_signal

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_OTHER_ANSWER = json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]})


class Steps:
    """A clock that wakes all streams at once."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._step_s)
            self._next.set_result(None)
            self._next = loop.create_future()

    async def wait(self) -> None:
        await asyncio.shield(self._next)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, steps: Steps) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_content_length(head))
            if not head.startswith(b"POST"):
                answer = _OTHER_ANSWER.encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(answer), answer)
                )
                continue
            writer.write(_HEAD)
            num_tokens = json.loads(body).get("max_tokens", 16)
            for index in range(num_tokens):
                if index > 0:
                    await steps.wait()
                writer.write(_chunk(_event(index)))
            writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
    writer.close()


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


def _event(index: int) -> bytes:
    choice = {"index": 0, "text": f" word{index}", "logprobs": None, "finish_reason": None}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock"}
    return b"data: " + json.dumps({**event, "choices": [choice]}).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(port: int, step_s: float) -> None:
    """Runs until SIGTERM or SIGINT."""
    steps = Steps(step_s)
    stepping = asyncio.create_task(steps.run())
    server = await asyncio.start_server(
        lambda reader, writer: _answer(reader, writer, steps), "127.0.0.1", port
    )
    sys.stdout.write(f"ready port={port}\n")
    sys.stdout.flush()
    await wait_for_stop_signal()
    server.close()
    stepping.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step [20]")
    arguments = parser.parse_args()
    return run_service(lambda: serve(arguments.port, arguments.step_ms / 1e3))


if __name__ == "__main__":
    sys.exit(main())
