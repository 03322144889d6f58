"""Clients of one endpoint, in a process of their own: `python -m bench.stream_clients`.

Closed loop: `--concurrency` clients ask one after the other until `--requests` are answered.
Open loop: with `--rate`, requests come at random (Poisson) and do not wait for each other.
Prints one JSON object: requests, tokens, seconds, and quantiles of TTFT in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc
import uvloop

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from bench.report import quantile

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
]
_END_OF_BODY = b"0\r\n\r\n"


@dataclass(frozen=True)
class Question:
    """What every request asks: a new prompt of so many words for so many tokens."""

    num_words: int
    num_tokens: int

    def prompt(self, draw: random.Random) -> str:
        """Different every time, so that no prefix cache helps."""
        return " ".join(draw.choices(WORDS, k=self.num_words))


Ask = Callable[[str], AsyncIterator[int]]
"""Sends a prompt; yields the number of tokens in each message as it comes."""


class GrpcClients:
    """Asks over gRPC. A few connections, as several client processes would have."""

    NUM_CHANNELS = 8

    def __init__(self, address: str, num_tokens: int) -> None:
        # Without a pool of its own each channel would share one connection.
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(self.NUM_CHANNELS)
        ]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        self._channels = channels
        self._num_tokens = num_tokens
        self._next = 0

    async def ask(self, prompt: str) -> AsyncIterator[int]:
        self._next += 1
        stub = self._stubs[self._next % len(self._stubs)]
        sampling = types_pb2.SamplingParams(max_tokens=self._num_tokens)
        request = inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
        async for message in stub.Generate(request):
            yield len(message.token_ids)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)


class SseClients:
    """Asks an OpenAI-compatible endpoint; connections are kept and used again."""

    def __init__(self, url: str, model: str, num_tokens: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._num_tokens = num_tokens
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str) -> AsyncIterator[int]:
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._request(prompt))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError((head + await reader.read(1000)).decode(errors="replace"))
        rest = b""
        while True:
            data = await reader.read(1 << 16)
            if not data:
                raise RuntimeError("the connection ended within a stream")
            # Events may be split between reads anywhere; the last bytes are looked at again.
            num_events = (rest[-5:] + data).count(b"data: ") - rest[-5:].count(b"data: ")
            rest = (rest + data)[-64:]
            is_done = rest.endswith(_END_OF_BODY)
            if num_events - is_done > 0:
                yield num_events - is_done
            if is_done:
                break
        self._idle.append((reader, writer))

    def _request(self, prompt: str) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": self._num_tokens,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@dataclass
class Tally:
    """What came."""

    num_requests: int = 0
    num_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    async def ask(self, ask: Ask, prompt: str) -> None:
        """One request to its end."""
        began_at = time.perf_counter()
        is_first = True
        async with aclosing(ask(prompt)) as counts:  # type: ignore[type-var]
            async for num_tokens in counts:
                if is_first:
                    self.ttfts_s.append(time.perf_counter() - began_at)
                    is_first = False
                self.num_tokens += num_tokens
        self.num_requests += 1


async def closed_loop(ask: Ask, question: Question, num_requests: int, concurrency: int) -> Tally:
    """`concurrency` clients, each asking again as soon as it is answered."""
    tally = Tally()
    draw = random.Random(time.time_ns())
    left = num_requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await tally.ask(ask, question.prompt(draw))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return tally


async def open_loop(ask: Ask, question: Question, num_requests: int, rate: float) -> Tally:
    """Requests at random times, `rate` a second on average."""
    tally = Tally()
    draw = random.Random(time.time_ns())
    loop = asyncio.get_running_loop()
    due = loop.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_requests):
            due += draw.expovariate(rate)
            await asyncio.sleep(due - loop.time())
            group.create_task(tally.ask(ask, question.prompt(draw)))
    return tally


async def run(arguments: argparse.Namespace) -> None:
    question = Question(arguments.words, arguments.tokens)
    clients: GrpcClients | SseClients
    if arguments.kind == "grpc":
        clients = GrpcClients(arguments.address, question.num_tokens)
    else:
        clients = SseClients(arguments.address, arguments.model, question.num_tokens)
    began_at = time.perf_counter()
    if arguments.rate is None:
        tally = await closed_loop(clients.ask, question, arguments.requests, arguments.concurrency)
    else:
        tally = await open_loop(clients.ask, question, arguments.requests, arguments.rate)
    elapsed_s = time.perf_counter() - began_at
    await clients.close()
    print(
        json.dumps(
            {
                "requests": tally.num_requests,
                "tokens": tally.num_tokens,
                "seconds": elapsed_s,
                "ttft_p50_ms": quantile(tally.ttfts_s, 0.5) * 1e3,
                "ttft_p99_ms": quantile(tally.ttfts_s, 0.99) * 1e3,
            }
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["grpc", "sse"])
    parser.add_argument("address", help="host:port for gRPC, http://host:port for SSE")
    parser.add_argument("--model", default="", help="name in SSE requests")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rate", type=float, help="requests a second; not given: closed loop")
    parser.add_argument("--words", type=int, default=30, help="of a prompt [30]")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer [64]")
    arguments = parser.parse_args()
    uvloop.run(run(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
