"""Routing's figures for Prometheus, read when it asks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.routing import RoutingCounters


class RoutingMetrics(Collector):
    """What the decisions of one router add up to."""

    def __init__(self, counters: RoutingCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        counters = self._counters
        yield CounterMetricFamily(
            "baton_routing_decisions", "Ways chosen for attempts", value=counters.decisions
        )
        ways = CounterMetricFamily(
            "baton_routing_decisions_of_kind", "Of them, so many", labels=["kind"]
        )
        ways.add_metric(["stayed_on_decode"], counters.stayed)
        ways.add_metric(["with_suspects"], counters.with_suspects)
        ways.add_metric(["without_room"], counters.without_room)
        ways.add_metric(["by_chance"], counters.by_chance)
        yield ways
        blocks = CounterMetricFamily(
            "baton_routing_blocks",
            "Terms of the cost: blocks of prompts to compute, held where they are computed, "
            "lacking on decode, to be pulled from another worker, and queued ahead of them",
            labels=["term"],
        )
        blocks.add_metric(["computed"], counters.computed_blocks)
        blocks.add_metric(["held"], counters.held_blocks)
        blocks.add_metric(["lacking"], counters.lacking_blocks)
        blocks.add_metric(["pulled"], counters.pulled_blocks)
        blocks.add_metric(["queued"], counters.queued_blocks)
        yield blocks
