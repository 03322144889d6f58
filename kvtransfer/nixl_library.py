"""Finds the NIXL wheel, sets UCX up for it and loads it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from core.errors import StartupError

NIXL_MODULES = ("nixl_cu13", "nixl_cu12")


def installed_nixl() -> str | None:
    """Name of the NIXL module that can be imported here, if any; imports nothing."""
    return next((name for name in NIXL_MODULES if importlib.util.find_spec(name)), None)


def require_nixl() -> str:
    """Name of the NIXL module. Raises StartupError, saying what to install."""
    module = installed_nixl()
    if module is None:
        raise StartupError(
            "transport nixl: neither nixl-cu12 nor nixl-cu13 is installed; "
            "install one that fits torch's CUDA, or use transport tcp"
        )
    return module


def ucx_defaults(memory: str, host: str) -> dict[str, str]:
    """What UCX and NIXL are told unless the environment says otherwise.

    UCX's own TCP defaults are four times slower; a large segment helps on loopback and hurts
    between network namespaces. CMA in its default segments of 512 KiB is a tenth slower than
    in whole large blocks. Device memory and RDMA need UCX's own choice of transports. Both
    libraries log to standard output unless told not to.
    """
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    segment = "256k" if is_loopback else "64k"
    defaults = {
        "UCX_TCP_TX_SEG_SIZE": segment,
        "UCX_TCP_RX_SEG_SIZE": segment,
        "UCX_TCP_SNDBUF": "4m",
        "UCX_TCP_RCVBUF": "4m",
        "UCX_CMA_SEG_SIZE": "2m",
        "UCX_LOG_FILE": "stderr",
        "NIXL_LOG_LEVEL": "WARN",
    }
    if memory == "DRAM" and not Path("/sys/class/infiniband").is_dir():
        defaults["UCX_TLS"] = "cma,tcp,self"
    return defaults


def load_nixl(memory: str, host: str) -> Any:
    """NIXL's Python module. Raises StartupError when there is none or it does not load.

    `memory` and `host`: what will be registered, and the address that peers reach it at.
    UCX reads its settings when it is loaded and when an agent is made, so the process's
    environment gets the defaults that it lacks.
    """
    module = require_nixl()
    for name, value in ucx_defaults(memory, host).items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StartupError(f"transport nixl: {error}") from error
