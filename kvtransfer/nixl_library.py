"""Finds the NIXL wheel, sets UCX up for it and loads it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from core.errors import StartupError
from kvtransfer.ucx_settings import ucx_defaults

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


def load_nixl(memory: str, host: str) -> Any:
    """NIXL's Python module. Raises StartupError when there is none or it does not load.

    `memory` and `host`: what will be registered, and the address that peers reach it at.
    UCX reads its settings when it is loaded and when an agent is made, so the process's
    environment gets the defaults that it lacks. NIXL, too, would log to standard output.
    """
    module = require_nixl()
    for name, value in {**ucx_defaults(memory, host), "NIXL_LOG_LEVEL": "WARN"}.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StartupError(f"transport nixl: {error}") from error
