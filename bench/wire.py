"""A TCP relay that can be cut, as when a client's process or its network dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 1 << 16


class Wire:
    """Relays from its own `address` to one target."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []
        self._copies: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def cut(self, *, reset: bool) -> None:
        """Ends every connection without a farewell: by a TCP reset, or by an end of stream as
        the kernel sends it for a killed process. Nobody can connect any more. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        for writer in self._writers:
            end: socket.socket = writer.get_extra_info("socket")
            # The peer may have ended the connection already.
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        if not self._server or not self._server.is_serving():
            target_writer.close()
            writer.close()
            return
        self._writers.append(target_writer)
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            self._copies.append(asyncio.create_task(_copy(source, sink)))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_CHUNK_BYTES):
            sink.write(data)
            await sink.drain()
        sink.close()
    except OSError:
        sink.close()


@contextlib.asynccontextmanager
async def wire(target: str) -> AsyncIterator[Wire]:
    """A Wire that is cut at the end."""
    between = Wire(target)
    await between.start()
    try:
        yield between
    finally:
        await between.cut(reset=True)
