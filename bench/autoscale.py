"""Autoscaling by demand against scaling by utilization and a fixed fleet, in simulated time.

The arithmetic is that of Kubernetes' HorizontalPodAutoscaler (bench.hpa) on the router's own
demand numbers (router.demand). `hpa` scales each role by them; `cpu` by how busy its pods are,
with a goal of 70 percent; `fixed` has as many pods as `hpa` has in the mean. The speeds of pods
are estimates for a model of 8B parameters on one large GPU (COSTS); what counts is how the
three compare.

The trace is thinned to a third of its requests in its first and last third, so that there is a
peak to follow. Loads: `mixed` as it is, `prefill` with answers of a tenth, `decode` with a
tenth of the prompts' tokens and four times the answers', `refused` begins at the peak with one
pod of each role, so that nearly all is refused at first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.autoscale_sim import DECODE, PREFILL, Deployment, Outcome, Role, Scale, Simulation
from bench.hpa import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    SYNC_S,
    Autoscaler,
    Behavior,
    Rules,
    num_oscillations,
    wish_of_total,
    wish_of_utilization,
)
from bench.report import Reporter, argument_parser
from bench.routing_pods import CostModel
from bench.routing_trace import Request, read_trace, synthetic_trace

COSTS = CostModel(
    prefill_step_s=5e-3,
    prefill_token_s=8e-5,
    attended_s=1e-9,
    decode_step_s=12e-3,
    sequence_s=1e-4,
    context_token_s=1.5e-8,
    handoff_s=5e-3,
    moved_token_s=3e-7,
)
DECODE_BLOCKS = 12_000
"""Of 16 tokens, on a decode pod."""
PROMPTS_TARGET = 2.0
TOKENS_TARGET = 15_000.0
"""A second and a quarter of a prefill pod's work."""
SEQUENCES_TARGET = 48.0
BLOCKS_TARGET = 0.7 * DECODE_BLOCKS
UTILIZATION_TARGET = 0.7
BEHAVIOR = Behavior(
    min_replicas=1,
    max_replicas=64,
    # A burst that is over within two rounds starts no pod.
    up=Rules(DEFAULT_UP.rates, window_s=30.0),
    down=DEFAULT_DOWN,
)
NUM_SYNTHETIC = 6000
MIN_ATTAINMENT = 0.9


@dataclass
class Scalers:
    """The two HPAs of a deployment."""

    by_utilization: bool

    def __post_init__(self) -> None:
        self.of_role = {PREFILL: Autoscaler(BEHAVIOR), DECODE: Autoscaler(BEHAVIOR)}

    def scale(self, simulation: Simulation, now: float) -> dict[Role, int]:
        """One round."""
        current = {PREFILL: simulation.prefill.replicas, DECODE: simulation.decode.replicas}
        wishes = (
            self._busy(simulation, current)
            if self.by_utilization
            else self._wanted(simulation, current)
        )
        return {
            role: scaler.decide(wishes[role], current[role], now)
            for role, scaler in self.of_role.items()
        }

    def _wanted(self, simulation: Simulation, current: dict[Role, int]) -> dict[Role, list[int]]:
        demand = simulation.demand
        return {
            PREFILL: [
                wish_of_total(demand.prefill_prompts, PROMPTS_TARGET, current[PREFILL]),
                wish_of_total(demand.prefill_queued_tokens, TOKENS_TARGET, current[PREFILL]),
            ],
            DECODE: [
                wish_of_total(demand.decode_sequences, SEQUENCES_TARGET, current[DECODE]),
                wish_of_total(demand.decode_blocks, BLOCKS_TARGET, current[DECODE]),
            ],
        }

    def _busy(self, simulation: Simulation, current: dict[Role, int]) -> dict[Role, list[int]]:
        prefill = simulation.prefill.utilization(lambda pod: pod.busy_s, SYNC_S)
        decode = simulation.decode.utilization(lambda pod: pod.busy_s, SYNC_S)
        return {
            PREFILL: [wish_of_utilization(prefill, UTILIZATION_TARGET, current[PREFILL])],
            DECODE: [wish_of_utilization(decode, UTILIZATION_TARGET, current[DECODE])],
        }

    @property
    def num_oscillations(self) -> int:
        window_s = BEHAVIOR.down.window_s
        return sum(num_oscillations(s.changes, window_s) for s in self.of_role.values())


def with_peak(requests: Sequence[Request]) -> list[Request]:
    """A third of the requests outside the middle third of the time."""
    end_s = requests[-1].arrival_s
    return [
        request
        for number, request in enumerate(requests)
        if number % 3 == 0 or end_s / 3 <= request.arrival_s < 2 * end_s / 3
    ]


def loads(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """The four loads."""
    peak = with_peak(requests)
    return {
        "mixed": peak,
        "prefill": [replace(r, num_outputs=max(1, r.num_outputs // 10)) for r in peak],
        "decode": [
            replace(r, num_prompt=max(16, r.num_prompt // 10), num_outputs=4 * r.num_outputs)
            for r in peak
        ],
        "refused": [r for r in requests if r.arrival_s < requests[-1].arrival_s / 3],
    }


def run(reporter: Reporter, name: str, requests: Sequence[Request], startup_s: float) -> None:
    """One load under the three ways to scale."""
    first = 1 if name == "refused" else 3
    deployment = Deployment(COSTS, DECODE_BLOCKS, {PREFILL: first, DECODE: first}, startup_s)
    hpa, cpu = Scalers(by_utilization=False), Scalers(by_utilization=True)
    ours = Simulation(deployment, hpa.scale).run(requests)
    theirs = Simulation(deployment, cpu.scale).run(requests)
    means = {role: math.ceil(_mean(ours.replicas[role])) for role in (PREFILL, DECODE)}
    fixed = Simulation(replace(deployment, initial=means), _keep(means)).run(requests)
    limit_s = deployment.ttft_limit_s
    for way, outcome, oscillations in (
        ("hpa", ours, hpa.num_oscillations),
        ("cpu", theirs, cpu.num_oscillations),
        ("fixed", fixed, 0),
    ):
        reporter.row(
            load=name,
            way=way,
            slo_attainment=outcome.attainment(limit_s),
            refused=outcome.num_refused / outcome.num_requests,
            pod_hours=outcome.pod_seconds / 3600,
            prefill_pods=_course(outcome, PREFILL),
            decode_pods=_course(outcome, DECODE),
            oscillations=oscillations,
        )
    reporter.check(f"{name}: oscillations of hpa", hpa.num_oscillations, "", "== 0")
    if name != "refused":
        attained = ours.attainment(limit_s)
        reporter.check(f"{name}: SLO attainment of hpa", attained, "", f">= {MIN_ATTAINMENT}")
    per_hour = [o.attainment(limit_s) / o.pod_seconds for o in (ours, theirs)]
    reporter.check(
        f"{name}: attainment per pod-hour of hpa", per_hour[0] / per_hour[1], "of cpu", ">= 1"
    )


def _keep(replicas: dict[Role, int]) -> Scale:
    return lambda simulation, now: replicas


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _course(outcome: Outcome, role: Role) -> str:
    """Replicas at ten times of the run."""
    values = outcome.replicas[role]
    return " ".join(str(values[index * (len(values) - 1) // 9]) for index in range(10))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--trace", type=Path, help="a file of JSON lines; default: made up")
    parser.add_argument("--startup-s", type=float, default=60.0, help="until a pod serves [60]")
    parser.add_argument("--seed", type=int, default=0, help="of a made-up trace [0]")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    reporter = Reporter("autoscale", arguments.json)
    if arguments.trace is None:
        requests = synthetic_trace(NUM_SYNTHETIC, arguments.seed)
    else:
        requests = read_trace(arguments.trace)
    for name, load in loads(requests).items():
        run(reporter, name, load, arguments.startup_s)
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
