"""What a server sees of a client that vanishes."""

from __future__ import annotations

import asyncio

import pytest

from bench.wire import Wire


async def connect(
    seen: asyncio.Queue[bytes | OSError],
) -> tuple[Wire, asyncio.StreamWriter, asyncio.Server]:
    """A client that has said b"hello" to a server through a wire."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                seen.put_nowait(data)
            seen.put_nowait(b"")
        except OSError as error:
            seen.put_nowait(error)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wire = Wire("{}:{}".format(*server.sockets[0].getsockname()))
    await wire.start()
    host, port = wire.address.split(":")
    _, client = await asyncio.open_connection(host, int(port))
    client.write(b"hello")
    assert await seen.get() == b"hello"
    return wire, client, server


@pytest.mark.parametrize("reset", [True, False])
async def test_a_cut_ends_the_servers_connection(reset: bool) -> None:
    seen: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    wire, client, server = await connect(seen)
    await wire.cut(reset=reset)
    end = await seen.get()
    assert isinstance(end, ConnectionResetError) if reset else end == b""
    await wire.cut(reset=reset)
    client.close()
    server.close()


async def test_nobody_connects_after_a_cut() -> None:
    wire, client, server = await connect(asyncio.Queue())
    await wire.cut(reset=True)
    host, port = wire.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))
    client.close()
    server.close()
