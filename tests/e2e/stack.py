"""A whole stack as a user starts it: `baton up` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from client import BatonClient, Completion

BATON = (sys.executable, "-m", "client.cli")
START_TIMEOUT_S = 120.0


@dataclass
class RunningStack:
    """A stack that serves."""

    address: str
    process: subprocess.Popen[str]

    def client(self) -> BatonClient:
        return BatonClient(self.address)

    def greedy(self, prompt: list[int], num_outputs: int, **options: object) -> Completion:
        """Greedy tokens, end tokens ignored."""
        with self.client() as client:
            return client.generate(
                token_ids=prompt,
                max_tokens=num_outputs,
                temperature=0.0,
                ignore_eos=True,
                **options,  # type: ignore[arg-type]
            )

    def children(self) -> dict[str, psutil.Process]:
        """The stack's processes by their name in the launch plan; `redis` is among them."""
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

    def wait_until_idle(self, timeout_s: float = 15.0) -> None:
        """Fails unless every worker comes back to its idle level and passes its audit."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.client() as client:
                workers = client.status(audit=True).workers
            busy = [w.id for w in workers if not _is_idle(w)]
            if not busy:
                break
            assert time.monotonic() < deadline, f"not idle: {workers}"
            time.sleep(0.05)
        for worker in workers:
            assert worker.audit.ok, (worker.id, list(worker.audit.errors))


def _is_idle(worker) -> bool:  # type: ignore[no-untyped-def]
    load = worker.load
    return not (
        load.queue_depth
        or load.running
        or load.exports
        or load.imports
        or load.blocks.referenced
        or load.blocks.quarantined
    )


@contextmanager
def running_stack(model: Path, *args: str, log_dir: Path | None = None) -> Iterator[RunningStack]:
    """Starts `baton up` on a free port, and stops it by SIGINT, as Ctrl-C does."""
    command = [*BATON, "up", "--model", str(model), "--port", "0", *args]
    if log_dir is not None:
        command += ["--log-dir", str(log_dir)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet_env()
    )
    try:
        yield RunningStack(_wait_ready(process), process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def _wait_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith("ready "):
            fields = dict(pair.split("=", 1) for pair in line.split()[1:])
            return fields["grpc"]
    raise AssertionError(f"the stack did not start: {process.stderr.read()}")


def quiet_env() -> dict[str, str]:
    """The environment of child processes: no hub, and no second set of compute threads."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_baton(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """One `baton` command to its end."""
    return subprocess.run(
        [*BATON, *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=quiet_env(),
        check=False,
    )
