"""The whole stack while its pods die: short runs of the benchmark that does it at length."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.stack import quiet_env

pytestmark = pytest.mark.e2e

RATES = {"completed requests", "faults"}


def run_chaos(*args: str) -> dict[str, float]:
    """The values of a run's checks, all of which held but for rates: those are the machine's."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.chaos", "--json", *args],
        capture_output=True,
        text=True,
        env=quiet_env(),
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1) and done.stdout, output
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    failed = [check["name"] for check in checks if not check["ok"]]
    assert set(failed) <= RATES, output
    values = {check["name"]: check["value"] for check in checks}
    assert all(values[name] > 0 for name in RATES), output
    return values


def test_pods_that_die_for_20_seconds_cost_no_client_a_token() -> None:
    values = run_chaos("--minutes", "0.33", "--seed", "7", "--cases", "40", "--users", "6")
    assert values["wrong outputs"] == values["leaked blocks"] == values["hung requests"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_pods_that_die_for_2_minutes_cost_no_client_a_token(transport: str) -> None:
    run_chaos("--minutes", "2", "--seed", "1", "--kv-transport", transport)
