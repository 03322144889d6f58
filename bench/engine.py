"""How fast the engine is on a CPU, as a pod drives it: scheduler, model, sampler; no network.

SmolLM2 and a random Llama of 246 million parameters: prefill of prompts of 512 and 2,048
tokens, decode at batch 1, 8 and 32 behind 512 tokens each. `of_limit` is the share of what the
machine could do at best, measured in the same run (`bench.engine_limits`). All take turns;
medians of the turns. On a machine that others use, too, take `--threads 1 --cpu-time`: two
threads then wait for each other more than they compute. The goals are those of the random
model: SmolLM2's matrices are so small that what surrounds them counts as much.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine_limits import Limits, Work, measure_limits
from bench.engine_steps import CASES, Case, EngineSubject
from bench.report import Reporter, argument_parser
from bench.small_model import NAME, small_model
from engine.cpu_kernels import CHOICES
from engine.fetch_smollm2 import default_folder, fetch

LIMIT_GOALS = {
    Case("decode", 1): ">= 0.85",
    Case("decode", 8): ">= 0.7",
    Case("decode", 32): ">= 0.6",
}


@dataclass
class Measured:
    """Every turn's figures for one model."""

    limits: list[Limits] = field(default_factory=list)
    seconds: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))

    def limit(self) -> Limits:
        return Limits(
            statistics.median(limits.bytes_per_s for limits in self.limits),
            statistics.median(limits.flops_per_s for limits in self.limits),
        )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each engine gets")
    parser.add_argument("--model", choices=(NAME, "smollm2"), action="append")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cpu-kernels", choices=CHOICES, default="auto")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of all threads, instead of elapsed time"
    )
    arguments = parser.parse_args()
    reporter = Reporter("engine", arguments.json)
    for name in arguments.model or (NAME, "smollm2"):
        _run_model(reporter, name, arguments)
    return reporter.finish()


def _run_model(reporter: Reporter, name: str, arguments: argparse.Namespace) -> None:
    folder = _folder(name)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    own = EngineSubject(folder, arguments.dtype, arguments.threads, arguments.cpu_kernels, clock)
    reporter.row(model=name, load_s=own.load_s, peak_memory_so_far_mib=_peak_memory_mib())
    measured = Measured()
    for _ in range(arguments.rounds):
        measured.limits.append(measure_limits(own.dtype, clock))
        for case in CASES:
            measured.seconds[case].append(own.step_s(case))
    limit = measured.limit()
    reporter.row(
        model=name,
        bandwidth_gb_s=limit.bytes_per_s / 1e9,
        multiply_gflops=limit.flops_per_s / 1e9,
    )
    work = Work.of(own.engine)
    for case in CASES:
        seconds = statistics.median(measured.seconds[case])
        of_limit = work.least_s(limit, case) / seconds
        reporter.row(
            model=name,
            phase=case.phase,
            size=case.num_tokens,
            step_ms=1e3 * seconds,
            tokens_per_s=case.num_tokens / seconds,
            of_limit=of_limit,
        )
        if name == NAME and case in LIMIT_GOALS:
            reporter.check(f"{case}", of_limit, "of the machine's limit", LIMIT_GOALS[case])


def _folder(name: str) -> Path:
    return small_model() if name == NAME else fetch(default_folder())


def _peak_memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
