"""Finds the ucxx wheel, sets UCX up for it and loads it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from core.errors import StartupError
from kvtransfer.ucx_settings import ucx_defaults

UCXX_MODULE = "ucxx"

RENDEZVOUS_BYTES = "8k"
"""From here on a message is announced first, and sent when the receiver knows its place.

The environment does not decide this: a shorter message comes in one piece, but a longer one
that is sent unannounced comes in several, and when the peer leaves in between, UCX never says
that the receive is over.
"""


def is_ucxx_installed() -> bool:
    """Whether a ucxx wheel can be imported here; imports nothing."""
    return importlib.util.find_spec(UCXX_MODULE) is not None


def require_ucxx() -> None:
    """Raises StartupError, saying what to install, when there is no ucxx."""
    if not is_ucxx_installed():
        raise StartupError(
            "transport ucxx: neither ucxx-cu13 nor ucxx-cu12 is installed; "
            "install one that fits torch's CUDA, or use transport tcp"
        )


@dataclass(frozen=True)
class Ucxx:
    """ucxx's bindings, and the settings for a UCX context."""

    api: Any
    """The module with UCXContext, UCXWorker, UCXEndpoint and so on."""
    array: Any
    """What turns an object with a buffer into something that the bindings take."""
    settings: dict[str, str]


def load_ucxx(memory: str, host: str) -> Ucxx:
    """Raises StartupError when there is no ucxx or it does not load.

    `memory` and `host`: what will be sent, and the address that peers reach it at.
    """
    require_ucxx()
    settings = ucx_defaults(memory, host)
    # UCX reads these when it is loaded; of the second ucxx would tell it too late.
    os.environ.setdefault("UCX_LOG_FILE", settings.pop("UCX_LOG_FILE"))
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    if "UCX_TLS" in settings:
        # Over TCP the owner's bytes are received where they belong, a quarter cheaper than the
        # messages that UCX would choose. Over RDMA its own choice is better.
        settings["UCX_RNDV_SCHEME"] = "put_zcopy"
    own = {name: value for name, value in settings.items() if name not in os.environ}
    own["UCX_RNDV_THRESH"] = RENDEZVOUS_BYTES
    try:
        api = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except ImportError as error:
        raise StartupError(f"transport ucxx: {error}") from error
    return Ucxx(api, array, {name.removeprefix("UCX_"): value for name, value in own.items()})
