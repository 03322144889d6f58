"""A whole stack as a user starts it, `baton up` in a process of its own, to measure or test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

BATON = (sys.executable, "-m", "client.cli")
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class LocalStack:
    """A stack that serves at `address`, and its HTTP API at `http` if it has one."""

    address: str
    http: str | None
    process: subprocess.Popen[str]

    def children(self) -> dict[str, psutil.Process]:
        """The stack's processes by name: router, redis, prefill-0, decode-0, …"""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            argv = child.cmdline()
            if "redis-server" in " ".join(argv[:1]):
                found["redis"] = child
            elif "--worker-id" in argv:
                found[argv[argv.index("--worker-id") + 1]] = child
            elif "router" in argv:
                found["router"] = child
        return found


@contextmanager
def local_stack(*args: str, env: Mapping[str, str] | None = None) -> Iterator[LocalStack]:
    """Runs `baton up` with `args` on a free port; stops it by SIGINT, as Ctrl-C does.

    Raises RuntimeError with what it said when it does not start.
    """
    process = subprocess.Popen(
        [*BATON, "up", "--port", "0", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        fields = _wait_ready(process)
        yield LocalStack(fields["grpc"], fields.get("http"), process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def _wait_ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """The pairs of the ready line."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("ready "):
            return dict(pair.split("=", 1) for pair in line.split()[1:])
    raise RuntimeError(f"the stack did not start: {process.stderr.read()}")
