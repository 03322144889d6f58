"""Runs tests/kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1200)


def run_kernel_tests(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, "tests/kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    run_kernel_tests("not slow")


@pytest.mark.slow
def test_kernels_agree_with_their_references_in_every_shape() -> None:
    run_kernel_tests("slow")
