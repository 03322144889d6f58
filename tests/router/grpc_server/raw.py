"""A client that sends what it is told to, of HTTP/2 or not, and reads when it is told to."""

from __future__ import annotations

import asyncio

from tests.core.http2.raw import RawPeer
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, room_for, settings
from tests.router.grpc_server.peers import BEGINNING


class RawClient(RawPeer):
    """`sent` and `received` are frames of HTTP/2: (kind, flags, stream, payload)."""

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
