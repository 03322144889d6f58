"""`python -m prefill_svc`: one prefill worker. `--help` lists its settings."""

from __future__ import annotations

import sys

from prefill_svc.service import PrefillService
from worker.main import run

if __name__ == "__main__":
    sys.exit(run("prefill_svc", PrefillService))
