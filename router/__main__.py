"""`python -m router`: the pod that clients talk to."""

from __future__ import annotations

import sys

from core import logs
from core.rpc import run_service
from core.settings import load_settings
from router.app import serve
from router.settings import RouterSettings


def main() -> int:
    settings = load_settings(RouterSettings, "python -m router", sys.argv[1:])
    logs.configure("router", settings.log_level)
    return run_service(lambda: serve(settings))


if __name__ == "__main__":
    sys.exit(main())
