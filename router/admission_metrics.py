"""Admission's figures for Prometheus, read when it asks. Autoscaling goes by the second."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.admission import Admission
from router.fallback import Fallback


class AdmissionMetrics(Collector):
    """Queue, refusals and fallbacks of one router."""

    def __init__(self, admission: Admission, fallback: Fallback) -> None:
        self._admission = admission
        self._fallback = fallback

    def collect(self) -> Iterable[Metric]:
        requests = GaugeMetricFamily(
            "baton_queued_requests", "Requests that wait in the router", labels=["class"]
        )
        tokens = GaugeMetricFamily(
            "baton_queued_tokens", "Their tokens, with expected output", labels=["class"]
        )
        for name, (num_requests, num_tokens) in self._admission.gate.queue.counts().items():
            requests.add_metric([name], num_requests)
            tokens.add_metric([name], num_tokens)
        waiting = GaugeMetricFamily(
            "baton_requests_waiting_for",
            "The same requests, by the role whose workers have no room for the next of them",
            labels=["role"],
        )
        waiting.add_metric(["prefill"], self._admission.gate.num_waiting_for_prefill)
        waiting.add_metric(["decode"], self._admission.gate.num_waiting_for_decode)
        counters = self._admission.counters
        refused = CounterMetricFamily(
            "baton_requests_refused", "Requests refused by admission", labels=["reason"]
        )
        for reason, count in counters.refused.items():
            refused.add_metric([reason], count)
        admitted = CounterMetricFamily(
            "baton_requests_admitted",
            "Requests let through to the workers",
            value=counters.num_admitted,
        )
        fallbacks = CounterMetricFamily(
            "baton_fallback_answers",
            "Requests that the fallback has answered",
            value=self._fallback.num_answers,
        )
        yield from (requests, tokens, waiting, refused, admitted, fallbacks)
