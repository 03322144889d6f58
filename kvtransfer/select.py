"""Chooses a transport by name."""

from __future__ import annotations

from core.errors import StartupError
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.tcp_transport import TcpTransport

TRANSPORTS = ("nixl", "tcp")


def make_transport(name: str, agent: str, region: MemoryRegion, host: str) -> Transport:
    """A transport that is not started. `agent` is the worker's id and epoch, `host` the
    address at which peers reach it. Raises StartupError for what this installation lacks."""
    if name == "tcp":
        return TcpTransport(agent, region, host)
    if name != "nixl":
        raise StartupError(f"transport {name!r} is not one of {', '.join(TRANSPORTS)}")
    try:
        # A worker without the NIXL wheel may lack numpy as well.
        from kvtransfer.nixl_agent import installed_nixl
        from kvtransfer.nixl_transport import NixlTransport
    except ImportError as error:
        raise StartupError(f"transport nixl: {error}") from error
    if installed_nixl() is None:
        raise StartupError(
            "transport nixl: neither nixl-cu12 nor nixl-cu13 is installed; "
            "install one that fits torch's CUDA, or use transport tcp"
        )
    return NixlTransport(agent, region, host)
