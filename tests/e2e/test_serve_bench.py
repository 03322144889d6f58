"""bench.serve starts a stack, sends it a load and reports what came back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

LOAD = ("--rate", "8", "--seconds", "2", "--warm-up", "0.5", "--prompt", "20-80", "--output", "4")


def test_every_request_of_a_light_load_is_served(tiny) -> None:  # type: ignore[no-untyped-def]
    model, _ = tiny("llama")
    command = [sys.executable, "-m", "bench.serve", "--json", "--model", str(model), *LOAD]
    command += ["--worker-args=--dtype float32 --num-gpu-blocks-override 512"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    row, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["target"] == "baton 1P1D"
    assert row["served"] == row["requests"] > 0
    assert row["good"] == 1.0
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    assert summary["ok"] is True
    assert "ended, 0 failed" in done.stderr
