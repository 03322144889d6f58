"""Chooses a transport by name."""

from __future__ import annotations

from core.errors import StartupError
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.nixl_library import require_nixl
from kvtransfer.tcp_transport import TcpTransport

TRANSPORTS = ("nixl", "tcp")


def make_transport(name: str, agent: str, region: MemoryRegion, host: str) -> Transport:
    """A transport that is not started. `agent` is the worker's id and epoch, `host` the
    address at which peers reach it. Raises StartupError for what this installation lacks."""
    if name == "tcp":
        return TcpTransport(agent, region, host)
    if name != "nixl":
        raise StartupError(f"transport {name!r} is not one of {', '.join(TRANSPORTS)}")
    require_nixl()
    # numpy comes with the wheel, so this import has to wait until the wheel is known.
    from kvtransfer.nixl_transport import NixlTransport

    return NixlTransport(agent, region, host)
