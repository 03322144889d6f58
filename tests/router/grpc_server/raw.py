"""A client that sends what it is told to, of HTTP/2 or not, and reads when it is told to."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import hpack

from core.http2.frames import HEAD, NUMBER, Kind
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, room_for, settings
from tests.router.grpc_server.peers import BEGINNING

_PATIENCE_S = 30


class RawClient:
    """`sent` and `received` are frames of HTTP/2: (kind, flags, stream, payload)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._decoder = hpack.Decoder()

    @classmethod
    async def connect(cls, address: str, window=0, preface=BEGINNING) -> RawClient:
        """Begins a connection, with room for `window` bytes for each stream and for all."""
        host, port = address.rsplit(":", 1)
        # No room for what has not been asked for.
        client = cls(*await asyncio.open_connection(host, int(port), limit=1 << 12))
        client.send(preface)
        if window:
            client.send(settings((INITIAL_WINDOW_SIZE, window)), room_for(0, window))
        return client

    def send(self, *data: bytes) -> None:
        self._writer.write(b"".join(data))

    async def next(self) -> tuple[int, int, int, bytes]:
        """The next frame."""
        async with asyncio.timeout(_PATIENCE_S):
            high, low, kind, flags, stream_id = HEAD.unpack(
                await self._reader.readexactly(HEAD.size)
            )
            return kind, flags, stream_id, await self._reader.readexactly(high << 8 | low)

    async def until(self, kind: Kind) -> tuple[int, int, int, bytes]:
        """The next frame of that kind."""
        while (received := await self.next())[0] != kind:
            pass
        return received

    async def headers(self) -> dict[str, str]:
        """The next ones."""
        _, _, _, block = await self.until(Kind.HEADERS)
        return dict(self._decoder.decode(block))

    async def reset_code(self) -> int:
        """Of the next stream that is reset."""
        return NUMBER.unpack((await self.until(Kind.RST_STREAM))[3])[0]

    async def goodbye(self) -> int:
        """The reason with which the server ends the connection; returns when it has."""
        _, _, _, payload = await self.until(Kind.GOAWAY)
        await self.ends()
        return NUMBER.unpack(payload[4:])[0]

    async def ends(self) -> None:
        """Returns when the server has ended the connection, or its side of it."""
        async with asyncio.timeout(_PATIENCE_S):
            with suppress(ConnectionError):
                await self._reader.read()

    async def close(self) -> None:
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
