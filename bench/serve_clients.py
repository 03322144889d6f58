"""Sends a load to an endpoint on schedule, whatever becomes of the answers, and writes down when
each message with output came. Over gRPC, or over HTTP as OpenAI's completions with SSE."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import grpc
import httptools
import orjson

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from bench.serve_figures import Record
from bench.serve_load import Planned
from core.errors import from_exception

_READ_BYTES = 1 << 16
_ERROR_CHARS = 120


class RequestFailed(Exception):
    """An endpoint refused or broke off; the message is the kind of failure."""


class Client(Protocol):
    """Asks one endpoint."""

    async def ask(self, planned: Planned, outputs: Outputs) -> None:
        """Returns when the answer is complete. Raises RequestFailed, OSError."""

    async def close(self) -> None: ...


class Outputs:
    """Where a client reports what comes."""

    def __init__(self, record: Record, began_at: float) -> None:
        self._record = record
        self._began_at = began_at

    def add(self, num_tokens: int) -> None:
        """A message with so many tokens, now."""
        self._record.arrivals_s.append(time.perf_counter() - self._began_at)
        self._record.num_tokens += num_tokens

    def set_total(self, num_tokens: int) -> None:
        """What the server says that it made: a message may bring more than one token."""
        self._record.num_tokens = num_tokens


class GrpcClient:
    """Asks a router of Baton."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def ask(self, planned: Planned, outputs: Outputs) -> None:
        sampling = types_pb2.SamplingParams(
            max_tokens=planned.num_outputs, temperature=0.0, ignore_eos=True
        )
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=planned.prompt), sampling=sampling
        )
        try:
            async for message in self._stub.Generate(request):
                if message.token_ids:
                    outputs.add(len(message.token_ids))
        except grpc.RpcError as error:
            raise RequestFailed(type(from_exception(error)).__name__) from error

    async def close(self) -> None:
        await self._channel.close(None)


class HttpClient:
    """Asks an OpenAI-compatible endpoint. `url` ends before /completions: http://HOST:PORT/v1.

    Connections are kept and used again. `options` are further fields of each request.
    """

    def __init__(
        self, url: str, model: str, api_key: str = "", options: dict[str, Any] | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not like http://HOST:PORT/v1")
        is_tls = parts.scheme == "https"
        self._tls = ssl.create_default_context() if is_tls else None
        self._host, self._port = parts.hostname, parts.port or (443 if is_tls else 80)
        self._body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._body |= options or {}
        head = f"POST {parts.path.rstrip('/')}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"{head}Content-Type: application/json\r\nContent-Length: "
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, planned: Planned, outputs: Outputs) -> None:
        fields = {"prompt": planned.prompt, "max_tokens": planned.num_outputs}
        body = orjson.dumps(self._body | fields)
        reader, writer = await self._connection()
        answer = _Answer(outputs)
        is_kept = False
        try:
            writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise RequestFailed("connection closed within an answer")
                answer.feed(data)
            is_kept = answer.keeps_connection
            answer.check()
        finally:
            if is_kept:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class _Answer:
    """One response, parsed as it comes."""

    def __init__(self, outputs: Outputs) -> None:
        self.is_complete = False
        self.keeps_connection = False
        self._outputs = outputs
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._rest = b""
        self._failure: str | None = None

    def feed(self, data: bytes) -> None:
        """Raises RequestFailed for what no OpenAI-compatible endpoint says."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise RequestFailed("not understood") from error

    def check(self) -> None:
        """Raises RequestFailed if the endpoint said that something went wrong."""
        if self._status != 200:
            raise RequestFailed(f"HTTP {self._status}")
        if self._failure is not None:
            raise RequestFailed(self._failure)

    def on_headers_complete(self) -> None:
        """The parser's."""
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """The parser's: a piece of the body, cut anywhere."""
        if self._status != 200:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._on_event(orjson.loads(event))

    def on_message_complete(self) -> None:
        """The parser's."""
        self.is_complete = True
        self.keeps_connection = self._parser.should_keep_alive()

    def _on_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self._failure = f"error in the stream: {event['error']}"[:_ERROR_CHARS]
        if any(choice.get("text") for choice in event.get("choices", ())):
            self._outputs.add(1)
        if event.get("usage"):
            self._outputs.set_total(event["usage"]["completion_tokens"])


class LoadRun:
    """One load on its way to an endpoint; leaving it takes back what is not answered."""

    def __init__(self, client: Client, load: Sequence[Planned], timeout_s: float) -> None:
        self._client = client
        self._load = load
        self._timeout_s = timeout_s
        self.records = [Record(due_s=planned.due_s) for planned in load]
        self.tasks: list[asyncio.Task[None]] = []
        self._began_at = 0.0

    @property
    def now_s(self) -> float:
        """Since the load's start."""
        return time.perf_counter() - self._began_at

    async def __aenter__(self) -> Self:
        self._began_at = time.perf_counter()
        self.tasks = [
            asyncio.create_task(self._send(planned, record))
            for planned, record in zip(self._load, self.records, strict=True)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _send(self, planned: Planned, record: Record) -> None:
        await asyncio.sleep(planned.due_s - self.now_s)
        record.sent_s = self.now_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.ask(planned, Outputs(record, self._began_at))
            record.is_complete = True
        except RequestFailed as error:
            record.error = str(error)
        except TimeoutError:
            record.error = "timeout"
        except OSError as error:
            record.error = type(error).__name__
