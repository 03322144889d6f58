"""Products with quantized matrices on a CPU: `python -m bench.quantized_speed [--json]`.

CPU time of one thread, bfloat16 rows, against the unquantized matrix in turns; more matrices than
any cache holds, so that one row waits for memory as a decode step of one sequence does.
`speedup` above 1 is faster than bfloat16.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping

import torch

from bench.report import Reporter, argument_parser
from engine.cpu_kernels import choose_kernels
from engine.linear import Linear
from engine.quantization.schemes import quantize
from engine.quantization.weight import Code, QuantizedWeight, pack_int4

NUM_OUTPUTS, NUM_INPUTS = 5632, 1024
NUM_MATRICES = 8
ROUNDS = 5
GROUP_SIZE = 128


def _int4() -> QuantizedWeight:
    codes = torch.randint(-8, 8, (NUM_OUTPUTS, NUM_INPUTS), dtype=torch.int8)
    scales = torch.rand(NUM_OUTPUTS, NUM_INPUTS // GROUP_SIZE)
    zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int8)
    return QuantizedWeight(Code.INT4, pack_int4(codes), scales, zeros, GROUP_SIZE)


def _matrices(kind: str, weight: torch.Tensor) -> list[Linear]:
    """Copies of one matrix, each in memory of its own."""
    kernels = choose_kernels("auto", torch.bfloat16, torch.device("cpu"), lambda _: None)
    storage = kernels.storage(torch.bfloat16)
    made = [Linear() for _ in range(NUM_MATRICES)]
    quantized = None
    if kind != "bfloat16":
        quantized = _int4() if kind == "int4" else quantize(weight, Code(kind))
    for matrix in made:
        if quantized is None:
            matrix.weight = weight.clone()
            storage.keep(matrix)
        else:
            storage.keep_quantized(matrix, quantized)
    return made


def _seconds(matrices: Mapping[str, list[Linear]], num_rows: int) -> dict[str, float]:
    x = torch.randn(num_rows, NUM_INPUTS).bfloat16()
    found: dict[str, list[float]] = {kind: [] for kind in matrices}
    for _ in range(ROUNDS):
        for kind, each in matrices.items():
            began = time.process_time()
            for matrix in each:
                matrix(x)
            found[kind].append(time.process_time() - began)
    return {kind: statistics.median(times) / NUM_MATRICES for kind, times in found.items()}


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    reporter = Reporter("quantized_speed", arguments.json)
    torch.set_num_threads(1)
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS).bfloat16()
    matrices = {kind: _matrices(kind, weight) for kind in ("bfloat16", "int8", "fp8", "int4")}
    for num_rows in (1, 8, 32, 256):
        seconds = _seconds(matrices, num_rows)
        for kind, taken in seconds.items():
            speedup = seconds["bfloat16"] / taken
            reporter.row(rows=num_rows, weights=kind, milliseconds=1e3 * taken, speedup=speedup)
            if num_rows == 1 and kind in ("int8", "int4"):
                reporter.check(f"{kind}, one row", speedup, "times bfloat16", ">= 1.2")
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
