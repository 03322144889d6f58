"""A worker's figures for Prometheus, read when it asks: the step loop only adds numbers up.

Names and meanings are vLLM's where it has them, with Baton's prefix. What a client sees of a
request (latencies, its tokens) is counted once, by its router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.v1 import types_pb2
from kvtransfer.routes import link_kind


@dataclass
class WorkerCounters:
    """Totals since the start of this worker. Whoever does it adds to them."""

    num_steps: int = 0
    step_s: float = 0.0
    num_step_tokens: int = 0
    num_sampled_tokens: int = 0
    num_preempted: int = 0
    num_given_back: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_exports: int = 0
    num_expired_exports: int = 0
    num_read_bytes: int = 0
    read_s: float = 0.0
    exposed_s: float = 0.0
    num_failed_reads: int = 0
    graph_dispatches: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Steps by mode and number of tokens of their graph; ("NONE", "") ran without."""


@dataclass(frozen=True)
class WorkerFigures:
    """What a scrape tells."""

    load: types_pb2.Load = field(default_factory=types_pb2.Load)
    counters: WorkerCounters = field(default_factory=WorkerCounters)
    is_ready: bool = False
    info: dict[str, str] = field(default_factory=dict)
    """Constant: id, role, model, KV transport."""
    kv_routes: tuple[str, ...] = ()
    link_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """By worker id."""


class WorkerMetrics(Collector):
    """`figures` are asked for on the event loop."""

    def __init__(self, figures: Callable[[], WorkerFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        yield InfoMetricFamily(
            "baton_worker", "Which worker this is, and how its KV moves", value=figures.info
        )
        yield GaugeMetricFamily(
            "baton_ready", "1 while the worker takes new requests", value=float(figures.is_ready)
        )
        yield from _load(figures.load)
        yield from _blocks(figures.load.blocks)
        yield from _engine(figures.counters)
        yield from _graphs(figures.counters)
        yield from _transfers(figures.counters)
        yield from _links(figures)


def _load(load: types_pb2.Load) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "baton_num_requests_running", "Sequences in the batch", value=load.running
    )
    yield GaugeMetricFamily(
        "baton_num_requests_waiting",
        "Requests that wait to be computed; on decode, for room",
        value=load.queue_depth,
    )
    yield GaugeMetricFamily(
        "baton_num_requests", "Requests taken in and not over", value=load.requests
    )
    yield GaugeMetricFamily(
        "baton_waiting_prompt_tokens",
        "Prompt tokens still to compute, without cached ones",
        value=load.queued_tokens,
    )
    yield GaugeMetricFamily(
        "baton_exports", "Hand-offs and loans that others read or will read", value=load.exports
    )
    yield GaugeMetricFamily(
        "baton_imports", "Hand-offs and prefixes that are being read here", value=load.imports
    )


def _blocks(blocks: types_pb2.BlockStats) -> Iterable[Metric]:
    used = blocks.referenced + blocks.quarantined
    yield GaugeMetricFamily(
        "baton_kv_cache_usage_perc",
        "KV blocks in use, of all; 1 is 100 percent",
        value=used / blocks.total if blocks.total else 0.0,
    )
    states = GaugeMetricFamily(
        "baton_kv_blocks",
        "KV blocks by state; a quarantined one waits for a read that was given up",
        labels=["state"],
    )
    for state in ("free", "cached", "referenced", "quarantined"):
        states.add_metric([state], getattr(blocks, state))
    yield states


def _engine(counters: WorkerCounters) -> Iterable[Metric]:
    totals: tuple[tuple[str, str, float], ...] = (
        ("baton_steps", "Steps computed", counters.num_steps),
        ("baton_step_seconds", "Time in steps", counters.step_s),
        ("baton_step_tokens", "Tokens that steps have computed", counters.num_step_tokens),
        ("baton_sampled_tokens", "Tokens that steps have sampled", counters.num_sampled_tokens),
        (
            "baton_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            counters.num_prefix_queries,
        ),
        ("baton_prefix_cache_hits", "Of these, found there", counters.num_prefix_hits),
        (
            "baton_num_preemptions",
            "Sequences that lost their blocks to others",
            counters.num_preempted,
        ),
        (
            "baton_migrations",
            "Sequences given back to the router, to go on elsewhere",
            counters.num_given_back,
        ),
    )
    for name, text, value in totals:
        yield CounterMetricFamily(name, text, value=value)


def _graphs(counters: WorkerCounters) -> Iterable[Metric]:
    dispatches = CounterMetricFamily(
        "baton_graph_dispatches",
        "Steps by how they ran: FULL or PIECEWISE in a graph of `bucket` tokens, padding "
        "included, or NONE without one",
        labels=["mode", "bucket"],
    )
    for labels, count in counters.graph_dispatches.items():
        dispatches.add_metric(labels, count)
    yield dispatches


def _transfers(counters: WorkerCounters) -> Iterable[Metric]:
    totals: tuple[tuple[str, str, float], ...] = (
        ("baton_exports_opened", "Hand-offs and loans begun", counters.num_exports),
        (
            "baton_exports_expired",
            "Of these, not released before their lease was over",
            counters.num_expired_exports,
        ),
        ("baton_kv_read_bytes", "KV read from other workers", counters.num_read_bytes),
        ("baton_kv_read_seconds", "Time that reads took, each by itself", counters.read_s),
        (
            "baton_kv_exposed_seconds",
            "Of hand-offs, time from prefill's last word until decode could begin",
            counters.exposed_s,
        ),
        (
            "baton_kv_reads_failed",
            "Reads that failed or were given up",
            counters.num_failed_reads,
        ),
    )
    for name, text, value in totals:
        yield CounterMetricFamily(name, text, value=value)


def _links(figures: WorkerFigures) -> Iterable[Metric]:
    routes = GaugeMetricFamily(
        "baton_kv_transport_info",
        "1 for each way that KV was found to move; with UCX only where --kv-require is given",
        labels=["link", "route"],
    )
    for route in figures.kv_routes:
        routes.add_metric([link_kind(route).label, route], 1)
    yield routes
    speeds = GaugeMetricFamily(
        "baton_kv_link_bytes_per_second",
        "Speed of reads from another worker, of late",
        labels=["peer"],
    )
    for peer, bytes_per_s in figures.link_bytes_per_s.items():
        speeds.add_metric([peer], bytes_per_s)
    yield speeds


def metrics_app(figures: Callable[[], WorkerFigures]) -> ASGIApp:
    """GET /metrics, and /health: 200 while the worker takes new requests, 503 else."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(figures))

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(request: Request) -> Response:
        return Response(status_code=200 if figures().is_ready else 503)

    return Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])
