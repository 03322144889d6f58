"""A load goes out on schedule, and what comes back is read as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from bench.serve_clients import HttpClient, LoadRun
from bench.serve_figures import Record
from bench.serve_load import Planned

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


def chunked(body: bytes, size: int) -> bytes:
    """As chunks of `size` bytes, wherever that cuts."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@dataclass
class Endpoint:
    """Answers with the same bytes, and nobody before `num_awaited` requests have come."""

    answer: bytes
    num_awaited: int = 1
    url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)
    num_connections: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                if len(self.bodies) >= self.num_awaited:
                    self.may_answer.set()
                await self.may_answer.wait()
                writer.write(self.answer)
                if not self.answer.endswith(b"0\r\n\r\n"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: bytes, num_awaited: int = 1) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(answer, num_awaited)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        endpoint.url = f"http://127.0.0.1:{port}/v1"
        yield endpoint


async def asked(
    endpoint: Endpoint, due_s: Sequence[float] = (0.0,), times: int = 1, timeout_s: float = 20.0
) -> list[Record]:
    """The records of so many loads, one after the other."""
    client = HttpClient(endpoint.url, "m", api_key="secret", options={"temperature": 0})
    load = [Planned(due, [1, 2, 3], 7) for due in due_s]
    records = []
    for _ in range(times):
        async with LoadRun(client, load, timeout_s) as run:
            await asyncio.wait(run.tasks)
        records += run.records
    await client.close()
    return records


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_are_read_wherever_they_are_cut(size: int) -> None:
    body = text("") + text("a") + text("b") + event(choices=[], usage={"completion_tokens": 3})
    async with serving(HEAD + chunked(body + DONE, size)) as endpoint:
        (record,) = await asked(endpoint)
    # The usage says how many tokens it was; an event without text is no output.
    assert record.is_complete and record.error is None
    assert (len(record.arrivals_s), record.num_tokens) == (2, 3)


async def test_a_request_says_what_was_planned() -> None:
    async with serving(HEAD + chunked(text("a") + DONE, 100)) as endpoint:
        await asked(endpoint)
    (body,) = endpoint.bodies
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([1, 2, 3], 7, "m")
    assert body["stream"] is True and body["temperature"] == 0
    assert endpoint.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in endpoint.heads[0]


async def test_a_request_is_sent_although_nobody_has_got_an_answer() -> None:
    answer = HEAD + chunked(text("a") + DONE, 100)
    async with serving(answer, num_awaited=3) as endpoint:
        records = await asked(endpoint, due_s=(0.0, 0.05, 0.1))
    assert [record.due_s for record in records] == [0.0, 0.05, 0.1]
    assert all(record.is_complete and record.sent_s > record.due_s - 0.01 for record in records)
    assert min(record.arrivals_s[0] for record in records) >= records[2].sent_s
    assert endpoint.num_connections == 3


async def test_a_connection_is_used_again() -> None:
    async with serving(HEAD + chunked(text("a") + DONE, 100)) as endpoint:
        records = await asked(endpoint, times=3)
    assert all(record.is_complete for record in records)
    assert endpoint.num_connections == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 429 Slow down\r\ncontent-length: 2\r\n\r\n{}", "HTTP 429"),
        (HEAD + chunked(event(error="broken"), 100), "error in the stream: broken"),
        (HEAD + b"5\r\ndata:\r\n", "connection closed within an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "not understood"),
    ],
)
async def test_a_failure_has_a_kind(answer: bytes, kind: str) -> None:
    async with serving(answer) as endpoint:
        (record,) = await asked(endpoint)
    assert (record.error, record.is_complete) == (kind, False)


async def test_who_gets_no_answer_in_time_gives_up() -> None:
    async with serving(HEAD, num_awaited=2) as endpoint:
        (record,) = await asked(endpoint, timeout_s=0.1)
    assert record.error == "timeout"


async def test_nobody_listening_is_a_failure_of_its_own() -> None:
    (record,) = await asked(Endpoint(b"", url="http://127.0.0.1:9/v1"))
    assert record.error == "ConnectionRefusedError"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://"])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not like"):
        HttpClient(url, "m")
