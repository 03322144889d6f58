"""Logs: an event name and fields, one line each, on standard error. Never a prompt."""

from __future__ import annotations

import logging
import sys


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Logs `name key=value …`; nothing is formatted when `level` is off."""
    if logger.isEnabledFor(level):
        pairs = " ".join(f"{key}={value}" for key, value in fields.items())
        logger.log(level, "%s %s", name, pairs)


def configure(service: str, level: str) -> None:
    """Once per process, in `__main__`. `level` is a name of the logging module."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {service} %(name)s %(message)s",
    )
