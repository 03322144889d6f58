"""A TCP relay between a client and the router that can reset the connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 1 << 16


class Relay:
    """Relays to `target`; `reset` ends every connection without a farewell."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Both ends hear a TCP reset, now and whenever they try again. Idempotent."""
        self._listener.close()
        ends, self._ends = self._ends, []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            # Wakes the thread that waits for it; the close then resets the connection.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                router = socket.create_connection(self._target)
                self._ends += [client, router]
                for source, sink in ((client, router), (router, client)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)


@contextmanager
def relay(target: str) -> Iterator[Relay]:
    """A Relay whose connections are reset at the end."""
    between = Relay(target)
    try:
        yield between
    finally:
        between.reset()
