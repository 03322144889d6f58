"""What a router counts, for Prometheus.

Counters and histograms are filled by requests as they go; gauges are read when asked for.
docs/metrics.md is made from what is said here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.v1 import inference_pb2, types_pb2
from core.errors import from_exception, status_of
from router.outputs import OutputLog
from router.workers import WorkerPool

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_MAX_GAPS = 4096
"""Different values that are kept before they are put into buckets."""


class RouterMetrics:
    """The counters and histograms, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "baton_requests",
            "Requests that have ended, by outcome: ok, cancelled, or the name of the error",
            ["outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "baton_prompt_tokens",
            "Prompt tokens of requests that got a token from a worker, once for each",
            registry=registry,
        )
        self._cached_tokens = Counter(
            "baton_cached_prompt_tokens",
            "Of these, tokens that prefill found in its prefix cache",
            registry=registry,
        )
        self._output_tokens = Counter(
            "baton_generation_tokens", "Tokens generated, whatever the outcome", registry=registry
        )
        self.ttft = Histogram(
            "baton_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl = GapHistogram(
            "baton_inter_token_latency_seconds",
            "Between consecutive outputs of one choice",
            ITL_BUCKETS_S,
        )
        registry.register(self.itl)
        self._e2e = Histogram(
            "baton_e2e_request_latency_seconds",
            "From a request's arrival to its end, of those that ended well",
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "baton_request_time_per_output_token_seconds",
            "After the first token, time for each of a request's tokens, in the mean; of those "
            "with one choice that ended well",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self._retries = Counter(
            "baton_request_retries",
            "Attempts after the first: after a failure, or where decode gave a sequence back",
            registry=registry,
        )
        self.http_responses = Counter(
            "baton_http_responses",
            "HTTP responses by status code; 499 where the client left before",
            ["status"],
            registry=registry,
        )

    def prompt_computed(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt whose first output token is there."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)

    def attempt_repeated(self) -> None:
        """Counts an attempt after a request's first."""
        self._retries.inc()

    def request_ended(self, log: OutputLog, is_cancelled: bool) -> None:
        """Counts one request in."""
        self._output_tokens.inc(log.num_tokens)
        if log.outcome is not None:
            self._requests.labels("ok").inc()
            self._count_times(log, log.outcome.timing)
        elif is_cancelled or log.error is None:
            self._requests.labels("cancelled").inc()
        else:
            code = status_of(from_exception(log.error)).grpc.name
            self._requests.labels(code.lower()).inc()

    def _count_times(self, log: OutputLog, timing: inference_pb2.Timing) -> None:
        self._e2e.observe(timing.total_s)
        if len(log.choices) == 1 and log.num_tokens > 1:
            self._tpot.observe((timing.total_s - timing.ttft_s) / (log.num_tokens - 1))


class GapHistogram(Collector):
    """A histogram that takes a value in a fraction of a microsecond: one comes with each token.

    `gaps[seconds] += 1` counts one. Those of a step, which are nearly all the same, are put into
    their bucket at once, later.
    """

    def __init__(self, name: str, documentation: str, bounds_s: Sequence[float]) -> None:
        self.gaps = _Gaps(self._sort)
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def _sort(self, gaps: Mapping[float, int]) -> None:
        for seconds, count in gaps.items():
            self._counts[bisect_left(self._bounds, seconds)] += count
            self._sum += count * seconds

    def collect(self) -> Iterable[Metric]:
        self.gaps.sort()
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


class _Gaps(dict[float, int]):
    """How often each of some values has come."""

    def __init__(self, take: Callable[[Mapping[float, int]], None]) -> None:
        super().__init__()
        self._take = take

    def __missing__(self, seconds: float) -> int:
        if len(self) >= _MAX_GAPS:
            self.sort()
        return 0

    def sort(self) -> None:
        self._take(self)
        self.clear()


class RouterGauges(Collector):
    """What is now: read from the router's own state when Prometheus asks."""

    def __init__(self, num_running: Callable[[], int], pool: WorkerPool) -> None:
        self._num_running = num_running
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "baton_requests_in_flight",
            "Requests that have not ended",
            value=self._num_running(),
        )
        labels = ["worker", "role"]
        is_ready = GaugeMetricFamily(
            "baton_worker_ready", "1 while requests may go to the worker", labels=labels
        )
        queue = GaugeMetricFamily(
            "baton_worker_queue_depth", "Requests that wait there to be computed", labels=labels
        )
        running = GaugeMetricFamily(
            "baton_worker_running", "Sequences in the worker's batch", labels=labels
        )
        for link in self._pool.links:
            role = types_pb2.Role.Name(link.record.role).removeprefix("ROLE_").lower()
            values = [link.worker_id, role]
            is_ready.add_metric(values, float(link.is_ready))
            if link.load is not None:
                queue.add_metric(values, link.load.queue_depth)
                running.add_metric(values, link.load.running)
        yield from (is_ready, queue, running)
