"""Pairs vLLM's prefill and decode servers: `python -m bench.vllm_proxy`.

As its documentation of the NixlConnector has it: prefill is asked for one token and says where
the KV lies, and decode is asked for the answer with that. Every connection serves one request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

import httptools
import orjson
import uvloop

from core.rpc import wait_for_stop_signal

_READ_BYTES = 1 << 16
_KEEP_KV = {"do_remote_decode": True, "do_remote_prefill": False}


class _Message:
    """A request or response, parsed as it comes."""

    def __init__(self) -> None:
        self.path = b""
        self.body = b""
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _read(
    reader: asyncio.StreamReader,
    kind: type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser],
) -> tuple[_Message, bytes]:
    """The next message, and its bytes. Raises ConnectionError when it does not come whole."""
    message = _Message()
    parser = kind(message)
    raw = b""
    while not message.is_complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            raise ConnectionError("the connection ended within a message")
        raw += data
        parser.feed_data(data)
    return message, raw


def _post(path: bytes, body: dict[str, Any]) -> bytes:
    data = orjson.dumps(body)
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
    return head + data


class Proxy:
    """Answers a client by the two servers on these ports of this machine."""

    def __init__(self, prefill_port: int, decode_port: int) -> None:
        self._prefill_port = prefill_port
        self._decode_port = decode_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. What either server refuses goes to the client as it is."""
        with contextlib.suppress(ConnectionError):
            request, _ = await _read(reader, httptools.HttpRequestParser)
            body = orjson.loads(request.body)
            answer, raw = await self._prefill(request.path, body)
            transfer = orjson.loads(answer.body).get("kv_transfer_params")
            if transfer is None:
                writer.write(raw)
            else:
                await self._decode(request.path, body | {"kv_transfer_params": transfer}, writer)
        writer.close()

    async def _prefill(self, path: bytes, body: dict[str, Any]) -> tuple[_Message, bytes]:
        first = {key: value for key, value in body.items() if key != "stream_options"}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _KEEP_KV}
        reader, writer = await asyncio.open_connection("127.0.0.1", self._prefill_port)
        try:
            writer.write(_post(path, first))
            return await _read(reader, httptools.HttpResponseParser)
        finally:
            writer.close()

    async def _decode(
        self, path: bytes, body: dict[str, Any], client: asyncio.StreamWriter
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._decode_port)
        try:
            writer.write(_post(path, body))
            while data := await reader.read(_READ_BYTES):
                client.write(data)
                await client.drain()
        finally:
            writer.close()


async def _serve(port: int, proxy: Proxy) -> None:
    """Runs until SIGTERM or SIGINT."""
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", port)
    await wait_for_stop_signal()
    server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "prefill", "decode"):
        parser.add_argument(f"--{name}", type=int, required=True, help="a port of 127.0.0.1")
    arguments = parser.parse_args()
    proxy = Proxy(arguments.prefill, arguments.decode)
    uvloop.run(_serve(arguments.port, proxy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
