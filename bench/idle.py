"""What a stack costs before anybody asks it anything, and while nobody does.

First the time from the start of a lone worker to its ready line, warm: what it reads is in the
page cache, and its kernels are compiled. Then CPU time of each process of an idle stack, in
percent of one core. That stack has served a request before, so that every connection is open.
Busy polling in any part (an event loop, a transport's thread, a heartbeat) shows here.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

from bench.local_stack import LocalStack, local_stack
from bench.pods import PodStack
from bench.report import Reporter, argument_parser
from bench.small_model import NAME, small_model
from client import BatonClient
from client.launch_plan import UpConfig
from engine.fetch_smollm2 import MODEL_NAME, default_folder, fetch
from kvtransfer.select import AUTO, TRANSPORTS

SETTLE_S = 3.0
GOAL_PERCENT = 5.0
GOAL_READY_S = 6.0


def measure(stack: LocalStack, seconds: float) -> dict[str, float]:
    """CPU time of each process over `seconds`, in percent of one core."""
    processes = {**stack.children(), "launcher": psutil.Process(stack.process.pid)}
    before = {name: _cpu_s(process) for name, process in processes.items()}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    return {
        name: 100 * (_cpu_s(process) - before[name]) / elapsed_s
        for name, process in processes.items()
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report_starts(reporter: Reporter, models: dict[str, str], up: UpConfig, count: int) -> None:
    """Starts a worker of each model `count` times, in turns, behind one start that warms."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(count + 1):
        for name, model in models.items():
            ready_s = _ready_s(replace(up, model=model))
            if turn > 0:
                seconds[name].append(ready_s)
    for name, found in seconds.items():
        median_s = statistics.median(found)
        reporter.row(model=name, ready_s=median_s, slowest_ready_s=max(found))
        reporter.check(f"start of a worker of {name}", median_s, "s", f"<= {GOAL_READY_S}")


def _ready_s(up: UpConfig) -> float:
    """From the start of the one worker of `up`, a Redis running, to its ready line."""
    with tempfile.TemporaryDirectory() as run_dir:
        stack = PodStack(up, Path(run_dir))
        (worker,) = stack.workers.values()
        try:
            stack.redis.start()
            stack.redis.wait_ready()
            began_at = time.monotonic()
            worker.start()
            worker.wait_ready()
            return time.monotonic() - began_at
        finally:
            stack.close()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to watch [20]")
    parser.add_argument("--starts", type=int, default=5, help="of each model's worker; 0: none [5]")
    parser.add_argument("--model", help=f"folder or hub name [{MODEL_NAME}; starts: {NAME}, too]")
    parser.add_argument(
        "--kv-transport", choices=[AUTO, *TRANSPORTS], default=AUTO, help="[as `baton up`]"
    )
    args = parser.parse_args()
    reporter = Reporter("idle", args.json)
    model = args.model or str(fetch(default_folder()))
    models = {Path(model).name: model} | ({} if args.model else {NAME: str(small_model())})
    up = UpConfig(model, num_prefill=0, kv_transport=args.kv_transport)
    if args.starts > 0:
        report_starts(reporter, models, up, args.starts)
    with (
        local_stack("--model", model, "--kv-transport", args.kv_transport) as stack,
        BatonClient(stack.address) as client,
    ):
        client.generate("The sky is", max_tokens=16)
        time.sleep(SETTLE_S)
        percents = measure(stack, args.seconds)
    for name, percent in sorted(percents.items()):
        reporter.row(process=name, cpu_percent_of_a_core=percent)
    total = sum(percents.values())
    # The clock of /proc ticks 100 times a second; a watch must be long enough to resolve 5 %.
    reporter.row(process="resolution", cpu_percent_of_a_core=_resolution(args.seconds))
    reporter.check("idle CPU of the whole stack", total, "% of a core", f"<= {GOAL_PERCENT}")
    return reporter.finish()


def _resolution(seconds: float) -> float:
    return 100 / (os.sysconf("SC_CLK_TCK") * seconds)


if __name__ == "__main__":
    sys.exit(main())
