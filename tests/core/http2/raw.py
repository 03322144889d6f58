"""A peer that sends what it is told to, of HTTP/2 or not, and reads when it is told to."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import hpack

from core.http2.frames import HEAD, NUMBER, Kind

_PATIENCE_S = 30


class RawPeer:
    """`sent` and `received` are frames of HTTP/2: (kind, flags, stream, payload)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._decoder = hpack.Decoder()

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
        """The reason with which the peer ends the connection; returns when it has."""
        _, _, _, payload = await self.until(Kind.GOAWAY)
        await self.ends()
        return NUMBER.unpack(payload[4:])[0]

    async def ends(self) -> None:
        """Returns when the peer has ended the connection, or its side of it."""
        async with asyncio.timeout(_PATIENCE_S):
            with suppress(ConnectionError):
                await self._reader.read()

    async def finish(self) -> None:
        """Sends what waits and leaves."""
        self._writer.close()
        await self._writer.wait_closed()

    async def close(self) -> None:
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
