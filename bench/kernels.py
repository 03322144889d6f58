"""What the Triton kernels take of a GPU: `python -m bench.kernels [--json] [--quick]`.

Compiles every kernel ahead of time, with the arguments that its launcher really passes, for
sm_80 (A100), sm_90 (H100, H200) and sm_100 (B200), and prints registers, spilled bytes and
shared memory as the compiler reports them. Needs no GPU and says nothing about speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.report import Reporter, argument_parser
from engine.kernels.activation import silu_and_multiply
from engine.kernels.decode_attention import DecodeRows, decode_attention
from engine.kernels.digests import digest_lanes
from engine.kernels.norms import add_rms_norm, rms_norm
from engine.kernels.prefill_attention import PrefillRows, prefill_attention
from engine.kernels.quantized_matmul import quantized_matmul
from engine.kernels.rotary_write import HeadNorms, RotaryRows, rotate_and_write
from engine.kernels.sampling import SamplingRows, sample_rows
from engine.quantization.weight import Code, QuantizedWeight

ARCHITECTURES = (80, 90, 100)
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that one block of threads may have (CUDA C++ Programming Guide, compute capabilities)."""
_OPTIONS = ("num_warps", "num_stages")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as its launcher asked for it."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's, with the kind of codes where it reads some."""
        code = self.arguments.get("CODE")
        return self.kernel.__name__ if code is None else f"{self.kernel.__name__} {code}"

    def source(self) -> ASTSource:
        """Types, constants and alignment as a real launch would specialize on."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            signature[parameter.name] = _type_of(value)
            if not isinstance(value, int | float) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


@dataclass(frozen=True)
class Usage:
    """What one program of a compiled kernel takes."""

    registers: int
    """A thread."""
    spilled_bytes: int
    """A thread's stack frame: what did not fit the registers."""
    shared_bytes: int


def compile_for(launch: Launch, architecture: int) -> Usage:
    """Compiles for sm_`architecture`; needs the compiler that comes with Triton, and no GPU."""
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(launch.source(), target=target, options=launch.options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(registers, stack, compiled.metadata.shared)


def launches_of(run: Callable[[], object]) -> list[Launch]:
    """What `run`, given tensors without memory, would launch."""
    found: list[Launch] = []
    with _recorded(found):
        run()
    return found


@contextmanager
def _recorded(found: list[Launch]) -> Iterator[None]:
    original = triton.JITFunction.run

    def record(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        found.append(Launch(kernel, arguments, options))

    triton.JITFunction.run = record
    try:
        yield
    finally:
        triton.JITFunction.run = original


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", output)
    if found is None:
        raise RuntimeError(f"cuobjdump prints no resources: {output}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


@dataclass(frozen=True)
class ModelShape:
    """What of a model the kernels see."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    is_fp8: bool = False
    """The KV cache."""


MODEL_SHAPES = (
    ModelShape("8B", 4096, 14336, 32, 8, 128, 128256),
    ModelShape("135M, windows", 576, 1536, 9, 3, 64, 49152, window=1024),
    ModelShape("head_dim 80", 2560, 10240, 32, 32, 80, 50304, torch.float16, block_size=32),
    ModelShape("head_dim 256", 3072, 24576, 16, 1, 256, 256000, block_size=64),
    ModelShape("8B in float32", 4096, 14336, 32, 8, 128, 128256, torch.float32),
    ModelShape("8B, KV in fp8", 4096, 14336, 32, 8, 128, 128256, is_fp8=True),
    ModelShape(
        "head_dim 256, KV in fp8", 3072, 24576, 16, 1, 256, 256000, block_size=64, is_fp8=True
    ),
)


def model_launches(shape: ModelShape, architecture: int) -> list[Launch]:
    """Every launch of a step of such a model: decode with one split and with many, prefill, and
    the products with its gate and up matrix in codes."""
    found: list[Launch] = []
    for run in (
        *(_decode_of(shape, 1), _decode_of(shape, 16), _prefill_of(shape), _rows_of(shape)),
        _products_of(shape, has_fp8=architecture >= 89),
    ):
        found += launches_of(run)
    return found


def _meta(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _cache_of(shape: ModelShape) -> torch.Tensor:
    sizes = (64, 4, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return _meta(*sizes, dtype=torch.uint8 if shape.is_fp8 else shape.dtype)[:, 0]


def _scales_of(shape: ModelShape) -> torch.Tensor | None:
    if not shape.is_fp8:
        return None
    return _meta(64, 4, 2, shape.num_kv_heads, shape.block_size, dtype=torch.float32)[:, 0]


def _decode_of(shape: ModelShape, num_splits: int) -> Callable[[], object]:
    query = _meta(8, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    rows = DecodeRows(_meta(8, 64, dtype=torch.int32), _meta(8, dtype=torch.int32))
    cache, scales = _cache_of(shape), _scales_of(shape)
    return lambda: decode_attention(query, cache, rows, shape.window, num_splits, scales)


def _prefill_of(shape: ModelShape) -> Callable[[], object]:
    query = _meta(512, shape.num_heads, shape.head_dim, dtype=shape.dtype)
    output = _meta(512, shape.num_heads * shape.head_dim, dtype=shape.dtype)
    numbers = [_meta(size, dtype=torch.int32) for size in (5, 4, 16, 16)]
    rows = PrefillRows(_meta(4, 64, dtype=torch.int32), *numbers)
    cache, scales = _cache_of(shape), _scales_of(shape)
    return lambda: prefill_attention(query, cache, rows, shape.window, output, scales)


def _rows_of(shape: ModelShape) -> Callable[[], object]:
    def run() -> None:
        half = shape.head_dim // 2
        angles = _meta(8, half, dtype=torch.float32)
        rows = RotaryRows(angles, angles, _meta(8, dtype=torch.int64))
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        qkv = _meta(8, num_all * shape.head_dim, dtype=shape.dtype)
        weights = _meta(shape.head_dim, dtype=shape.dtype)
        for norms in (None, HeadNorms(weights, weights, 1e-6)):
            rotate_and_write(qkv, _cache_of(shape), rows, norms, _scales_of(shape))
        hidden = _meta(8, shape.hidden_size, dtype=shape.dtype)
        weight = _meta(shape.hidden_size, dtype=shape.dtype)
        rms_norm(hidden, weight, 1e-6)
        add_rms_norm(hidden, hidden, weight, 1e-6)
        silu_and_multiply(_meta(8, 2 * shape.intermediate_size, dtype=shape.dtype))
        words = _meta(64, dtype=torch.int64)
        digest_lanes(words, words, words, 1 << 16)
        sample_rows(_meta(8, shape.vocab_size, dtype=shape.dtype), _sampling_rows())

    return run


def _products_of(shape: ModelShape, has_fp8: bool) -> Callable[[], object]:
    num_outputs, num_inputs = 2 * shape.intermediate_size, shape.hidden_size

    def weight(code: Code, group_size: int, scales: torch.dtype) -> QuantizedWeight:
        sizes = (num_outputs, -(-num_inputs // group_size))
        zeros = _meta(*sizes, dtype=torch.int8) if code is Code.INT4 else None
        codes = _meta(num_outputs, num_inputs // code.per_byte, dtype=code.dtype)
        return QuantizedWeight(code, codes, _meta(*sizes, dtype=scales), zeros, group_size)

    def run() -> None:
        weights = (
            weight(Code.INT8, num_inputs, torch.float32),
            weight(Code.FP8, 128, torch.float32),
            weight(Code.INT4, 128, torch.float16),
        )
        for num_rows in (1, 64, 512):
            x = _meta(num_rows, num_inputs, dtype=shape.dtype)
            for each in weights:
                quantized_matmul(x, each, None, has_fp8=has_fp8)

    return run


def _sampling_rows() -> SamplingRows:
    types = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    return SamplingRows(*(_meta(8, dtype=dtype) for dtype in types))


def main() -> int:
    """Prints a row for each kernel, model shape and architecture; fails if one spills."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one model shape, one architecture")
    args = parser.parse_args()
    reporter = Reporter("kernels", args.json)
    shapes = MODEL_SHAPES[:1] if args.quick else MODEL_SHAPES
    architectures = (90,) if args.quick else ARCHITECTURES
    jobs = [
        (shape, launch, architecture)
        for shape in shapes
        for architecture in architectures
        for launch in model_launches(shape, architecture)
    ]
    with ThreadPoolExecutor() as threads:
        usages = list(threads.map(lambda job: compile_for(job[1], job[2]), jobs))
    for (shape, launch, architecture), usage in zip(jobs, usages, strict=True):
        reporter.row(
            model=shape.name,
            kernel=launch.name,
            sm=architecture,
            warps=launch.options["num_warps"],
            registers=usage.registers,
            spilled_bytes=usage.spilled_bytes,
            shared_bytes=usage.shared_bytes,
            fits=usage.shared_bytes <= SHARED_LIMITS[architecture],
        )
    spilled = sum(usage.spilled_bytes for usage in usages)
    too_large = sum(
        usage.shared_bytes > SHARED_LIMITS[job[2]] for job, usage in zip(jobs, usages, strict=True)
    )
    reporter.check("bytes spilled, all kernels", spilled, "bytes", "== 0")
    reporter.check("kernels with too much shared memory", too_large, "kernels", "== 0")
    return reporter.finish()


if __name__ == "__main__":
    raise SystemExit(main())
