"""Chooses a transport: by name, or the best one that this installation has."""

from __future__ import annotations

import logging

from core import logs
from core.errors import StartupError
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.nixl_library import installed_nixl, require_nixl
from kvtransfer.tcp_transport import TcpTransport
from kvtransfer.ucxx_library import is_ucxx_installed, require_ucxx
from kvtransfer.ucxx_transport import UcxxTransport

logger = logging.getLogger(__name__)

TRANSPORTS = ("nixl", "ucxx", "tcp")
"""From the best to the one that needs nothing."""
AUTO = "auto"


def installed_transports() -> tuple[str, ...]:
    """Those of TRANSPORTS that can be made here; imports none of their libraries."""
    is_installed = {"nixl": bool(installed_nixl()), "ucxx": is_ucxx_installed(), "tcp": True}
    return tuple(name for name in TRANSPORTS if is_installed[name])


def choose_transport() -> str:
    """What `auto` stands for here. Logs the choice and its reason.

    It depends on nothing but what is installed, so that all pods of an image choose alike.
    """
    installed = installed_transports()
    missing = TRANSPORTS[: TRANSPORTS.index(installed[0])]
    reason = f"{' and '.join(missing)} not installed" if missing else "first choice"
    logs.event(logger, logging.INFO, "kv_transport", chosen=installed[0], reason=reason)
    return installed[0]


def make_transport(name: str, agent: str, region: MemoryRegion, host: str) -> Transport:
    """A transport that is not started. `agent` is the worker's id and epoch, `host` the
    address at which peers reach it. Raises StartupError for what this installation lacks."""
    if name == AUTO:
        name = choose_transport()
    if name == "tcp":
        return TcpTransport(agent, region, host)
    if name == "ucxx":
        require_ucxx()
        return UcxxTransport(agent, region, host)
    if name == "nixl":
        require_nixl()
        # numpy comes with the wheel, so this import has to wait until the wheel is known.
        from kvtransfer.nixl_transport import NixlTransport

        return NixlTransport(agent, region, host)
    raise StartupError(f"transport {name!r} is not one of {', '.join((AUTO, *TRANSPORTS))}")
