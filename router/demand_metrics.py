"""This router's part of the demand for Prometheus, read when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.demand import Totals


class DemandMetrics(Collector):
    """`own`: what no worker knows of."""

    def __init__(self, own: Callable[[], Totals]) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        demand = GaugeMetricFamily(
            "baton_router_demand",
            "Part of the demand that autoscaling goes by: what waits in this router or was "
            "refused lately",
            labels=["quantity"],
        )
        for quantity, value in asdict(self._own()).items():
            demand.add_metric([quantity], value)
        yield demand
