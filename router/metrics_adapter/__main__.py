"""`python -m router.metrics_adapter`: serves demand to the Kubernetes API server."""

from __future__ import annotations

import sys

from core import logs
from core.rpc import run_service
from core.settings import load_settings
from router.metrics_adapter.server import serve
from router.metrics_adapter.settings import AdapterSettings


def main() -> int:
    settings = load_settings(AdapterSettings, "python -m router.metrics_adapter", sys.argv[1:])
    logs.configure("metrics-adapter", settings.log_level)
    return run_service(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
