"""Requests that come on one connection before the first is answered."""

from __future__ import annotations

import asyncio
import json
import re

from tests.router.fakes import Script
from tests.router.stack import REPLY, wait_for

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "stream": True}


def raw_request(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


async def connect(s) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = s.stack.http_url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def text_of(answer: bytes) -> str:
    """What the events of a streamed chat say."""
    parts = re.findall(rb"^data: (\{.*\})$", answer, flags=re.MULTILINE)
    deltas = [json.loads(part)["choices"][0]["delta"] for part in parts]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_pipelined_streams_come_whole_one_after_the_other(serve):
    async with serve() as s:
        reader, writer = await connect(s)
        writer.write(2 * raw_request(CHAT))
        for _ in range(2):
            async with asyncio.timeout(30):
                answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert text_of(answer) == "Paris, of course."
        writer.close()


async def test_a_client_that_leaves_with_a_request_in_its_pipeline_frees_both_workers(serve):
    async with serve(script=Script(list(REPLY), num_decode_tokens=3)) as s:
        reader, writer = await connect(s)
        writer.write(2 * raw_request(CHAT))
        await reader.readuntil(b"data: ")
        writer.close()
        await wait_for(lambda: s.stack.prefills[0].aborts and s.stack.decodes[0].aborts)
        await wait_for(lambda: s.stack.router._table.num_running == 0)


async def test_a_long_body_does_not_count_as_headers_of_the_request_behind_it(serve):
    long = raw_request({**CHAT, "user": "a" * 40_000})
    async with serve() as s:
        reader, writer = await connect(s)
        head, rest = raw_request(CHAT).split(b"\r\n\r\n")
        writer.write(long + head)
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"\r\n\r\n" + rest)
            await reader.readuntil(b"0\r\n\r\n")
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
