"""The proxy asks prefill first, and decode with what prefill says of the KV."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.serve_clients import HttpClient, LoadRun
from bench.serve_figures import Record
from bench.serve_load import Planned
from bench.vllm_proxy import Proxy

WHERE = {"remote_host": "here", "remote_block_ids": [[1, 2]]}
STREAM = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


class Server:
    """Answers each request with the same body and closes."""

    def __init__(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._answer = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        self.asked: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        self.asked.append(json.loads(await reader.readexactly(length)))
        writer.write(self._answer)
        writer.close()


@asynccontextmanager
async def listening(serve: Any) -> AsyncIterator[int]:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def through_proxy(prefill: Server, decode: Server) -> Record:
    async with (
        listening(prefill.serve) as first,
        listening(decode.serve) as second,
        listening(Proxy(first, second).serve) as port,
    ):
        client = HttpClient(f"http://127.0.0.1:{port}/v1", "m")
        async with LoadRun(client, [Planned(0.0, [1, 2, 3], 9)], timeout_s=60.0) as run:
            await asyncio.wait(run.tasks)
        await client.close()
    return run.records[0]


async def test_decode_is_told_where_prefill_keeps_the_kv() -> None:
    prefill = Server(json.dumps({"kv_transfer_params": WHERE}).encode())
    decode = Server(STREAM)
    record = await through_proxy(prefill, decode)
    assert record.is_complete and len(record.arrivals_s) == 1
    (first,), (second,) = prefill.asked, decode.asked
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in first
    assert (second["max_tokens"], second["stream"]) == (9, True)
    assert second["kv_transfer_params"] == WHERE
    assert first["prompt"] == second["prompt"] == [1, 2, 3]


async def test_what_prefill_refuses_goes_to_the_client() -> None:
    decode = Server(STREAM)
    record = await through_proxy(Server(b"{}", status=b"400 Bad Request"), decode)
    assert record.error == "HTTP 400"
    assert decode.asked == []
