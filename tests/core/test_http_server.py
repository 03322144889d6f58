"""How a service's HTTP server ends."""

from __future__ import annotations

import asyncio

import pytest

from core.address import port_of
from core.http_server import HttpServer

_MORE_THAN_SOCKETS_HOLD = 32 << 20


async def large(scope, receive, send) -> None:
    """Sends more than a client takes that does not read."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for is_first in (True, False):
        body = bytes(_MORE_THAN_SOCKETS_HOLD)
        await send({"type": "http.response.body", "body": body, "more_body": is_first})


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("::", "[::]")])
async def test_an_ipv6_address_stands_in_brackets(host, shown) -> None:
    server = HttpServer(large, host, 0)
    address = await server.start()
    try:
        assert address.rpartition(":")[0] == shown
    finally:
        await server.stop(0)


async def test_all_addresses_of_ipv6_are_those_of_ipv4_too() -> None:
    server = HttpServer(large, "::", 0)
    address = await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    writer.close()
    await server.stop(0)


async def test_a_second_stop_shortens_the_grace_of_the_first() -> None:
    server = HttpServer(large, "127.0.0.1", 0)
    address = await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    first = asyncio.ensure_future(server.stop(3600))
    await asyncio.sleep(0.3)
    assert not first.done()
    async with asyncio.timeout(60):
        await server.stop(0)
        await first
    writer.close()
