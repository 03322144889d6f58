"""A stack under mixed load while its pods are killed, suspended and restarted at random.

Two prefill and two decode workers serve short and long prompts, some with shared prefixes,
greedy and sampled. Clients cancel, vanish, set deadlines and ask twice. Every half minute the
load pauses: every block must be free again on every pod, and the next requests right.

What must hold: no wrong token, no leaked block, no request that outlives its deadline, no
failure but typed errors. A seed draws the same requests and the same faults again; when they
meet is up to the machine. Ctrl-C ends the run early, with all checks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from bench.chaos_acts import ChaosLimits
from bench.chaos_faults import Fault
from bench.chaos_load import COMPLETED, HUNG, REQUEST_TIMEOUT_S, UNTYPED, WRONG
from bench.chaos_run import ChaosConfig, ChaosRun, Seen, say
from bench.pods import PodStack, pod_stack
from bench.random_model import write_random_model
from bench.report import Reporter, argument_parser
from client.launch_plan import UpConfig

LEASE_S = 1.0
SILENCE_S = 2.5
"""After so long a suspended worker counts as lost: half of the default, for more of them."""
MODEL = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 512,
    "rope_theta": 1000.0,
}
"""Little to compute, but 32 KiB of KV a token: most of a prompt's time is the hand-off."""
GOAL_COMPLETED_PER_S = 1.0
GOAL_FAULTS_PER_S = 0.1
_WORKER_ARGS = (
    *("--dtype", "float32", "--max-recompute-tokens", "64", "--max-quarantined-share", "0.9"),
    # Short, so that they run out while a worker is suspended.
    *("--lease-s", str(LEASE_S), "--max-lease-s", "8", "--import-timeout-s", "8"),
)
_DRAWN_ARGS = {
    # Small pools, so that requests wait for room, are preempted, and caches lose blocks.
    "--num-gpu-blocks-override": ("48", "96", "160"),
    "--max-num-batched-tokens": ("64", "192", "1024"),
    # Without digests, that no block is wrong rests on leases and quarantine alone.
    "--kv-verify": ("always", "sampled", "off"),
}
_ROUTER_ARGS = (
    *("--worker-silence-s", str(SILENCE_S), "--worker-poll-s", "0.2"),
    *("--request-timeout-s", str(REQUEST_TIMEOUT_S)),
    # Few requests stay on decode; the others are handed off.
    *("--local-prefill-max-tokens", "32"),
)


def main() -> int:
    try:
        return _measure(_arguments())
    except KeyboardInterrupt:
        # Before the load began there is nothing to tell.
        return 130


def _measure(args: argparse.Namespace) -> int:
    reporter = Reporter("chaos", args.json)
    run_dir = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    model = args.model
    if model is None:
        (run_dir / "model").mkdir()
        write_random_model(run_dir / "model", MODEL, seed=0)
        model = str(run_dir / "model")
    stack_config = UpConfig(
        model=model,
        num_prefill=2,
        num_decode=2,
        kv_transport=args.kv_transport,
        threads_per_worker=1,
        worker_args=(*_WORKER_ARGS, *_drawn_args(random.Random(args.seed))),
        router_args=_ROUTER_ARGS,
        log_level=args.log_level,
    )
    config = ChaosConfig(
        duration_s=60 * args.minutes,
        seed=args.seed,
        num_cases=args.cases,
        num_users=args.users,
        limits=ChaosLimits(LEASE_S, SILENCE_S, args.hard),
    )
    with pod_stack(stack_config, run_dir) as stack:
        seen = asyncio.run(_run(stack, config))
    _report(reporter, seen)
    exit_code = reporter.finish()
    if exit_code or args.keep:
        say(f"the pods' logs are in {run_dir}")
    else:
        shutil.rmtree(run_dir)
    return exit_code


def _drawn_args(rng: random.Random) -> list[str]:
    drawn = [part for flag, values in _DRAWN_ARGS.items() for part in (flag, rng.choice(values))]
    say(f"workers: {' '.join(drawn)}")
    return drawn


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="time under load [2]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--cases", type=int, default=100, help="different requests [100]")
    parser.add_argument("--users", type=int, default=10, help="requests at a time [10]")
    parser.add_argument("--model", help="folder or hub name [a small random model]")
    parser.add_argument("--kv-transport", default="auto", help="as of `baton up` [auto]")
    parser.add_argument(
        "--hard", action="store_true", help="all workers of a role may be away; the router too"
    )
    parser.add_argument("--log-level", default="INFO", help="of the pods [INFO]")
    parser.add_argument("--keep", action="store_true", help="keep the pods' logs in any case")
    args: argparse.Namespace = parser.parse_args()
    return args


async def _run(stack: PodStack, config: ChaosConfig) -> Seen:
    """To its end or to Ctrl-C; a second Ctrl-C skips the last checks."""
    run = ChaosRun(stack, config)
    task = asyncio.create_task(run.run())

    def interrupt() -> None:
        if run.is_stopping:
            task.cancel()
        say("stopping: the last checks follow; Ctrl-C again skips them")
        run.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return run.seen


def _report(reporter: Reporter, seen: Seen) -> None:
    for outcome, count in sorted((+seen.outcomes).items()):
        reporter.row(what="requests", kind=outcome, count=count)
    reporter.row(what="requests", kind="completed after a retry", count=seen.num_retried)
    for kind in sorted({fault.kind for fault in seen.faults.done}):
        _report_faults(reporter, kind, [f for f in seen.faults.done if f.kind == kind])
    num_faults = sum(bool(fault.pods) for fault in seen.faults.done)
    counts = {
        "answers that differ without a fault": seen.num_unsteady,
        "wrong outputs": seen.outcomes[WRONG],
        "leaked blocks": seen.num_leaked_blocks,
        "hung requests": seen.outcomes[HUNG],
        "untyped errors": seen.outcomes[UNTYPED],
        "not as they should be at rest": len(seen.not_at_rest),
        "pods that ended, or did not start or stop": len(seen.faults.problems),
    }
    for name, count in counts.items():
        reporter.check(name, count, "", "== 0")
    seconds = max(seen.loaded_s, 1.0)
    rate = seen.outcomes[COMPLETED] / seconds
    reporter.check("completed requests", rate, "a second", f">= {GOAL_COMPLETED_PER_S}")
    reporter.check("faults", num_faults / seconds, "a second", f">= {GOAL_FAULTS_PER_S}")
    reporter.check("rests", seen.num_rests, "", ">= 1")


def _report_faults(reporter: Reporter, kind: str, faults: list[Fault]) -> None:
    """How long until anything was answered, and until the pod itself took part again."""
    outages = [fault.outage_s for fault in faults if fault.outage_s is not None]
    returns = [fault.return_s for fault in faults if fault.return_s is not None]
    reporter.row(
        what="faults",
        kind=kind,
        count=len(faults),
        recovery_median_s=statistics.median(outages) if outages else None,
        recovery_max_s=max(outages, default=None),
        return_median_s=statistics.median(returns) if returns else None,
        return_max_s=max(returns, default=None),
    )


if __name__ == "__main__":
    sys.exit(main())
