"""Pieces that several subcommands share."""

from __future__ import annotations

import argparse
import os
from typing import TypeAlias

from client._options import DEFAULT_SERVER, MAX_TIMEOUT_S

Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_server(parser: argparse.ArgumentParser) -> None:
    """`--server HOST:PORT`, by default $BATON_SERVER."""
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=os.environ.get("BATON_SERVER") or DEFAULT_SERVER,
        help=f"router to talk to [$BATON_SERVER, else {DEFAULT_SERVER}]; "
        "if it wants an API key, give it in $BATON_API_KEY",
    )


def api_key() -> str | None:
    """From the environment: other users of the machine see arguments."""
    return os.environ.get("BATON_API_KEY") or None


def positive_int(text: str) -> int:
    """A whole number over 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def seconds(text: str) -> float:
    """A time span over 0 that timers can carry."""
    value = float(text)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"must be over 0 and at most {MAX_TIMEOUT_S}, not {text}")
    return value


def port_number(text: str) -> int:
    """A TCP port, or 0."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, not {value}")
    return value
