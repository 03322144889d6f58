"""Ports for processes that are told where to listen."""

from __future__ import annotations

import contextlib
import random
import socket

BELOW_CLIENTS = range(20_000, 32_000)
"""Below the ports that Linux gives to clients and to who asks for any, so that none of them takes
one that is to be listened on soon, or again."""


def free_ports(count: int, among: range = BELOW_CLIENTS) -> list[int]:
    """Different ports on which nobody listens now. Raises RuntimeError when there are too few."""
    found: list[int] = []
    for port in random.sample(among, len(among)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"fewer than {count} ports are free among {among}")
