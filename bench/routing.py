"""The routing policies over a trace, in simulated time: the router's own code decides.

8 prefill and 8 decode pods, each with a cache of `--cache-blocks` blocks of 512 tokens. Their
speeds are `COSTS`, measured by `bench.engine_costs` for SmolLM2 in float32 on one CPU thread;
what a hand-off costs is an estimate. Load reports come every second, and the
prefix index lags 0.1 s behind the caches.

A trace is stretched in time so that prefill would be busy for `--utilization` of it if nothing
were found in caches: loaded, but stable under any policy. The ideal hit rate is that of one LRU
cache of the prefill pods' total size. Without --trace, conversations are made up
(bench.routing_trace.synthetic_trace), or with --hot-prefixes single requests that share few
beginnings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import Reporter, argument_parser
from bench.routing_pods import CostModel
from bench.routing_sim import Cluster, Outcome, Simulation
from bench.routing_trace import (
    Request,
    hot_trace,
    ideal_hit_tokens,
    read_trace,
    stretched,
    synthetic_trace,
)
from router.policies import PolicyName

POLICIES: tuple[PolicyName, ...] = ("kv_aware", "least_loaded", "round_robin")
COSTS = CostModel(
    prefill_step_s=3.2e-3,
    prefill_token_s=3.3e-3,
    attended_s=1.4e-6,
    decode_step_s=78e-3,
    sequence_s=3.7e-3,
    context_token_s=1.3e-5,
    # These two are estimates.
    handoff_s=5e-3,
    moved_token_s=1e-5,
)
NUM_SYNTHETIC = 6000
NUM_HOT = 2500
MAX_IMBALANCE = 1.3


@dataclass(frozen=True)
class Workload:
    """A trace at the pace at which it is played."""

    requests: list[Request]
    ideal_hit_rate: float
    stretch: float


def prepare(requests: Sequence[Request], cluster: Cluster, utilization: float) -> Workload:
    """Stretches `requests` so that computing them whole keeps prefill busy for `utilization`."""
    busy_s = sum(cluster.costs.prefill_s(request.num_prompt, 0) for request in requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    stretch = busy_s / (cluster.num_prefill * span_s * utilization)
    hits = ideal_hit_tokens(requests, cluster.num_prefill * cluster.cache_blocks)
    hit_rate = sum(hits) / sum(request.num_prompt for request in requests)
    return Workload(stretched(requests, stretch), hit_rate, stretch)


def run(reporter: Reporter, workload: Workload, cluster: Cluster, seed: int) -> None:
    outcomes = {name: Simulation(cluster, name, seed).run(workload.requests) for name in POLICIES}
    for name, outcome in outcomes.items():
        reporter.row(
            policy=name,
            requests=len(outcome.ttft_s),
            ttft_p50_s=_quantile(outcome.ttft_s, 0.5),
            ttft_p90_s=_quantile(outcome.ttft_s, 0.9),
            ttft_p99_s=_quantile(outcome.ttft_s, 0.99),
            hit_rate=outcome.hit_rate,
            ideal_hit_rate=workload.ideal_hit_rate,
            prefill_busy=sum(outcome.prefill_busy_s)
            / cluster.num_prefill
            / workload.requests[-1].arrival_s,
            prefill_imbalance=outcome.prefill_imbalance,
            decode_imbalance=outcome.decode_imbalance,
            stayed=outcome.num_stayed / len(outcome.ttft_s),
            stretch=workload.stretch,
        )
    _check(reporter, outcomes, workload)


def _check(reporter: Reporter, outcomes: dict[PolicyName, Outcome], workload: Workload) -> None:
    ours = outcomes["kv_aware"]
    others = [outcomes[name].ttft_s for name in POLICIES if name != "kv_aware"]
    best = min(_quantile(times, 0.9) for times in others)
    share = _quantile(ours.ttft_s, 0.9) / best
    reporter.check("p90 TTFT of kv_aware", share, "of the best other", "< 1")
    hits = ours.hit_rate / workload.ideal_hit_rate
    reporter.check("hit rate of kv_aware", hits, "of ideal", ">= 0.9")
    for role, value in (
        ("prefill", ours.prefill_imbalance),
        ("decode", ours.decode_imbalance),
    ):
        reporter.check(
            f"most loaded {role} pod of kv_aware", value, "of the mean", f"<= {MAX_IMBALANCE}"
        )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--trace", type=Path, help="a file of JSON lines; default: made up")
    parser.add_argument(
        "--hot-prefixes", type=int, help="without --trace: so many prompts that all begin with"
    )
    parser.add_argument("--utilization", type=float, default=0.85, help="of prefill [0.85]")
    parser.add_argument("--cache-blocks", type=int, default=2500, help="of each pod [2500]")
    parser.add_argument("--seed", type=int, default=0, help="of chance in the policies [0]")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    reporter = Reporter("routing", arguments.json)
    if arguments.hot_prefixes is not None:
        requests = hot_trace(NUM_HOT, arguments.hot_prefixes, arguments.seed)
    elif arguments.trace is None:
        requests = synthetic_trace(NUM_SYNTHETIC, arguments.seed)
    else:
        requests = read_trace(arguments.trace)
    cluster = replace(Cluster(COSTS), cache_blocks=arguments.cache_blocks)
    workload = prepare(requests, cluster, arguments.utilization)
    run(reporter, workload, cluster, arguments.seed)
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
