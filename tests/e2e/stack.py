"""A whole stack as a user starts it: `baton up` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.local_stack import BATON, LocalStack, local_stack
from client import BatonClient, Completion

START_TIMEOUT_S = 120.0
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""For child processes: no hub, and no second set of compute threads."""


class RunningStack(LocalStack):
    """A stack that serves."""

    def client(self) -> BatonClient:
        return BatonClient(self.address)

    @property
    def redis_url(self) -> str:
        """Of the stack's own Redis."""
        argv = self.children()["router"].cmdline()
        return argv[argv.index("--redis-url") + 1]

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

    def wait_until_idle(self, timeout_s: float = 60.0) -> None:
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
def running_stack(
    model: Path,
    *args: str,
    local_prefill: int | None = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[RunningStack]:
    """Starts `baton up` on a free port, and stops it as Ctrl-C does.

    Every request is handed off, however short; up to `local_prefill` tokens stay on decode.
    None: as many as the router learns.
    """
    if local_prefill is not None:
        args = (*args, f"--router-args=--local-prefill-max-tokens {local_prefill}")
    with local_stack("--model", str(model), *args, env={**QUIET, **(env or {})}) as stack:
        yield RunningStack(stack.address, stack.http, stack.process)


def quiet_env() -> dict[str, str]:
    """The environment of child processes."""
    return {**os.environ, **QUIET}


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
