"""The workers' part of docs/metrics.md: `python -m worker.metrics_reference`."""

from __future__ import annotations

import sys

from prometheus_client import CollectorRegistry

from core.metrics_reference import table
from worker.metrics import WorkerFigures, WorkerMetrics

_HEAD = """
## Workers

At `/metrics` of `--metrics-port`, of prefill and decode workers alike.

"""


def render() -> str:
    """Head and table."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(WorkerFigures))
    return _HEAD + table(registry)


if __name__ == "__main__":
    sys.stdout.write(render())
