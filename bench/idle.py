"""What a stack costs while nobody asks it anything: CPU time of each process, in percent of
one core.

The stack has served a request before, so that every connection is open. Busy polling in any
part (an event loop, a transport's thread, a heartbeat) shows here.
"""

from __future__ import annotations

import os
import sys
import time

import psutil

from bench.local_stack import LocalStack, local_stack
from bench.report import Reporter, argument_parser
from client import BatonClient
from kvtransfer.select import AUTO, TRANSPORTS

SETTLE_S = 3.0
GOAL_PERCENT = 5.0


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


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to watch [20]")
    parser.add_argument("--model", help="folder or hub name [SmolLM2-135M-Instruct]")
    parser.add_argument("--kv-transport", choices=[AUTO, *TRANSPORTS], help="[as `baton up`]")
    args = parser.parse_args()
    reporter = Reporter("idle", args.json)
    up = [*(("--model", args.model) if args.model else ())]
    up += ("--kv-transport", args.kv_transport) if args.kv_transport else ()
    with local_stack(*up) as stack, BatonClient(stack.address) as client:
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
