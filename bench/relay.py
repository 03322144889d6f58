"""A network link of limited rate: a process between a reader and the blocks that it reads.

`python -m bench.relay HOST PORT BITS_PER_S` listens on a port of its own, which it prints,
forwards every connection to HOST:PORT, and paces what comes back. It ends with its standard
input.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from kvtransfer.local_peer import LOOPBACK

PIECE_BYTES = 64 << 10
BURST_S = 1e-3
"""How much of the link's time may be made up for, since sleeping is not exact."""


class Pacer:
    """The times at which bytes are through a link. No clock of its own."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._is_free_at = float("-inf")

    def through_at(self, num_bytes: int, now: float) -> float:
        """When the last of these bytes, which are at the link's entry now, has left it."""
        begins_at = max(self._is_free_at, now - BURST_S)
        self._is_free_at = begins_at + 8 * num_bytes / self._bits_per_s
        return self._is_free_at


class Relay:
    """Connections through one link, which they share."""

    def __init__(self, target: tuple[str, int], bits_per_s: float) -> None:
        self._target = target
        self._pacer = Pacer(bits_per_s)
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Accepts readers for ever."""
        while True:
            reader, _ = listener.accept()
            owner = socket.create_connection(self._target)
            for connection in (reader, owner):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((reader, owner, False), (owner, reader, True)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_paced: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if is_paced:
                    self._wait(len(piece))
                sink.sendall(piece)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            through_at = self._pacer.through_at(num_bytes, now)
        time.sleep(max(0.0, through_at - now))


@contextlib.contextmanager
def relay(target: tuple[str, int], bits_per_s: float) -> Iterator[int]:
    """The port on this machine at which `target` can be reached over the link."""
    command = [sys.executable, "-P", "-m", "bench.relay", target[0], str(target[1])]
    process = subprocess.Popen(
        [*command, str(bits_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> int:
    host, port, bits_per_s = sys.argv[1:]
    with socket.create_server((LOOPBACK, 0)) as listener:
        served = Relay((host, int(port)), float(bits_per_s))
        threading.Thread(target=served.serve, args=(listener,), daemon=True).start()
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
