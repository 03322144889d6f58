"""The GPU path on one GPU: `python -m bench.gpu [--json] [--dry-run]`, or `make test-gpu`.

Needs torch and Triton, neither Redis nor NIXL, and takes under 8 minutes:

1. every kernel against its eager reference, with an error bound from float64;
2. greedy tokens of a small float32 model, in every graph mode, against the engine on the CPU;
3. a random model of Llama-3-8B's shape: the time of a decode step by batch size, eager and as a
   graph, beside the floor (the bytes that it must read, at the speed of a copy measured in the
   same run); prefill beside the rate of one large matrix product; time and memory of recording.

With --dry-run the same code runs tiny shapes on the CPU in Triton's interpreter, to show that
everything is wired up; figures then mean nothing, and goals of speed are not checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from bench.report import Reporter, argument_parser


def main() -> int:
    """Runs everything; the exit code is 0 when every check holds."""
    parser = argument_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        # Read when Triton is imported, which everything below does.
        os.environ["TRITON_INTERPRET"] = "1"
    from bench import gpu_checks, gpu_speed

    reporter = Reporter("gpu", args.json)
    device = gpu_checks.find_device(args.dry_run)
    if device is None:
        print("bench.gpu needs a GPU; --dry-run runs without", file=sys.stderr)
        return 2
    began = time.monotonic()
    gpu_checks.check_kernels(reporter, device, args.dry_run)
    gpu_checks.check_digests(reporter, device)
    with tempfile.TemporaryDirectory() as folder:
        gpu_checks.check_tokens(reporter, Path(folder), device, args.dry_run)
    plan = gpu_speed.DRY if args.dry_run else gpu_speed.FULL
    gpu_speed.measure_speed(reporter, plan, device)
    reporter.row(part="all", seconds=time.monotonic() - began)
    return reporter.finish()


if __name__ == "__main__":
    raise SystemExit(main())
