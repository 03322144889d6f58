"""bench.gpu on a CPU: everything but the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_dry_run_checks_kernels_and_the_tokens_of_every_graph_mode() -> None:
    finished = run("--dry-run", "--json")
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert (finished.returncode, summary["ok"]) == (0, True), finished.stderr
    assert len(summary["checks"]) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    finished = run()
    assert finished.returncode == 2
    assert finished.stderr == "bench.gpu needs a GPU; --dry-run runs without\n"
