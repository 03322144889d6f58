"""`python -m decode_svc`: one decode worker. `--help` lists its settings."""

from __future__ import annotations

import sys

from decode_svc.service import DecodeService
from worker.main import run

if __name__ == "__main__":
    sys.exit(run("decode_svc", DecodeService))
