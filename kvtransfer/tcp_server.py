"""Owner side of the tcp transport: serves blocks of the own pool to readers.

One thread accepts; one more per reader sends, so that a slow reader holds up nobody else.
All of them wait in system calls while there is nothing to do.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from baton.v1 import kv_transfer_pb2
from core import logs
from kvtransfer.base import MemoryRegion
from kvtransfer.send_receive import region_view, requested_part
from kvtransfer.tcp_frames import ACCEPTED, receive_frame, runs, tune

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1


class TcpServer:
    """Serves `region` under the name `agent`, which includes the epoch of this process."""

    def __init__(self, agent: str, region: MemoryRegion) -> None:
        self._agent = agent
        self._region = region
        self._memory = region_view(region)
        self._lock = threading.Lock()
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False

    def start(self, host: str) -> int:
        """Listens on a free port of `host` and returns it. Raises OSError."""
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(address[:2], family=family)
        self._acceptor = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Cuts every reader off and waits for the threads."""
        with self._lock:
            self._is_closed = True
            readers = dict(self._readers)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for connection, thread in readers.items():
            _shut_down(connection)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logs.event(logger, logging.WARNING, "kv_accept_failed", error=error)
                # Out of file descriptors, most likely: the next call fails at once, too.
                time.sleep(ACCEPT_PAUSE_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True
            )
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._readers[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except OSError as error:
            logs.event(logger, logging.INFO, "kv_reader_lost", error=error)
        finally:
            with self._lock:
                del self._readers[connection]
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        tune(connection)
        connection.settimeout(HELLO_TIMEOUT_S)
        hello = receive_frame(connection, kv_transfer_pb2.KvHello)
        if hello is None:
            return
        if hello.agent != self._agent:
            raise ConnectionError(f"a reader looked for {hello.agent!r} at {self._agent!r}")
        connection.sendall(ACCEPTED)
        connection.settimeout(None)
        while (read := receive_frame(connection, kv_transfer_pb2.KvRead)) is not None:
            part = requested_part(read, self._region)
            for offset, num_bytes in runs(read.block_ids, self._region.block_bytes, part):
                connection.sendall(self._memory[offset : offset + num_bytes])


def _shut_down(connection: socket.socket) -> None:
    """Wakes the thread that waits on `connection`."""
    with contextlib.suppress(OSError):  # The reader may have been faster.
        connection.shutdown(socket.SHUT_RDWR)
