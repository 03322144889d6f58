"""What bench.gpu checks: kernels against references, tokens against the CPU's engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.drive import drive
from bench.gpu_model import RunAgain
from bench.kernel_cases import AttentionCase, attention_sweep
from bench.kernel_row_cases import RotaryCase, RowCase, SamplingCase
from bench.quantized_cases import QuantizedCase, quantized_sweep
from bench.random_model import write_random_model
from bench.report import Reporter
from core.sampling import SamplingParams
from engine.attention.triton import TritonAttention, TritonSettings
from engine.engine import Engine, EngineConfig, load_engine
from engine.gpu_runner import make_gpu_runner
from engine.graphs import GraphMode, GraphOptions
from engine.kernels.digests import digest_ranges
from engine.quantization.weight import Code
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import GraphModel
from engine.triton_linear import TritonQuantizer

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
DIGESTS = (0x666A945ACC1751AF, 0x8BBFE1F1E17B01A0, 0x9F171B14201EB17D)
"""XXH3-64 of 20,000 bytes from words 0, 100 and 1,100 on of the numbers 0, 1, 2 and so on."""
HALVES = (torch.bfloat16, torch.float16)


def find_device(is_dry: bool) -> torch.device | None:
    """The first GPU, the CPU for a dry run, or None."""
    if is_dry:
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() else None


def check_kernels(reporter: Reporter, device: torch.device, is_dry: bool) -> None:
    """Errors against float64, and draws against the host's sampler."""
    began = time.monotonic()
    num_wrong = 0
    cases = list(_cases(is_dry))
    for case in cases:
        errors = case.run(device)
        num_wrong += not errors.is_within
        if not errors.is_within:
            reporter.row(
                part="kernel error", case=str(case), error=errors.kernel, eager_error=errors.eager
            )
    num_draws = num_other = 0
    for dtype in (torch.float32,) if is_dry else (torch.float32, *HALVES):
        for step in (0.0, 1.0):
            vocab_size = 3000 if is_dry else 128256
            tokens, expected = SamplingCase(vocab_size, dtype, step).run(device)
            num_draws += len(tokens)
            num_other += sum(a != b for a, b in zip(tokens, expected, strict=True))
    reporter.row(
        part="kernels", cases=len(cases), draws=num_draws, seconds=time.monotonic() - began
    )
    reporter.check("kernels beyond the error bound", num_wrong, "cases", "== 0")
    # One number may fall within float32's rounding of a border between two tokens.
    reporter.check("draws other than the sampler's", num_other, "draws", "<= 1")


def check_digests(reporter: Reporter, device: torch.device) -> None:
    """Against what the xxhash library gives, which need not be there."""
    found = digest_ranges(torch.arange(4096, device=device), [0, 100, 1100], 20_000)
    num_wrong = sum(a != b for a, b in zip(found, DIGESTS, strict=True))
    reporter.check("digests other than a host's", num_wrong, "digests", "== 0")


def _cases(is_dry: bool) -> Iterator[AttentionCase | RotaryCase | RowCase | QuantizedCase]:
    """Of the attention's sweep every shape once in bfloat16, some in the other dtypes."""
    if is_dry:
        yield AttentionCase(((40, 1), (-1, 1), (0, 20)), num_processors=8)
        yield RotaryCase()
        yield RowCase("norm", 576)
        yield RowCase("gate", 576)
        yield QuantizedCase(Code.INT8)
        return
    yield from attention_sweep((torch.bfloat16,))[::2]
    yield from attention_sweep((torch.float16, torch.float32))[3::14]
    long = ((8191, 1), (4000, 1), (-1, 1), (1024, 512))
    for is_fp8 in (False, True):
        yield AttentionCase(
            long, 32, 8, 128, dtype=torch.bfloat16, num_processors=132, is_fp8=is_fp8
        )
    yield AttentionCase(long, 8, 1, 256, 64, 500, torch.float16, 132, is_fp8=True)
    for dtype in (torch.float32, *HALVES):
        for has_norms in (False, True):
            yield RotaryCase(32, 8, 128, has_norms=has_norms, dtype=dtype)
        for size in (576, 4096):
            yield RowCase("norm", size, dtype)
            yield RowCase("gate", size, dtype)
    yield from quantized_sweep(TritonQuantizer.on(torch.device("cuda")).has_fp8)


def check_tokens(reporter: Reporter, folder: Path, device: torch.device, is_dry: bool) -> None:
    """Greedy tokens of prompts of several lengths, side by side, in every graph mode."""
    write_random_model(folder, SMALL, seed=0)
    lengths, num_outputs = ((3, 18), 3) if is_dry else ((1, 15, 16, 33, 100, 300), 24)
    expected = _tokens(_engine(folder, "cpu", GraphMode.NONE), lengths, num_outputs)
    for mode in GraphMode:
        began = time.monotonic()
        engine = _engine(folder, device.type, GraphMode.NONE if is_dry else mode)
        if is_dry:
            object.__setattr__(engine, "runner", _dry_runner(engine, mode))
        # In the interpreter a step takes seconds.
        modes_ahead = (GraphMode.FULL_DECODE_ONLY,) if is_dry else tuple(GraphMode)
        for is_async in (False, True) if mode in modes_ahead else (False,):
            tokens = _tokens(engine, lengths, num_outputs, is_async)
            num_equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
            name = f"{mode.value}, steps ahead" if is_async else mode.value
            reporter.row(
                part="tokens",
                mode=name,
                prompts=len(lengths),
                equal=num_equal,
                seconds=time.monotonic() - began,
            )
            share = num_equal / len(lengths)
            reporter.check(f"prompts with the CPU's tokens, {name}", share, "share", "== 1")


def _engine(folder: Path, device: str, mode: GraphMode) -> Engine:
    config = EngineConfig(
        model=folder,
        dtype="float32",
        device=device,
        num_gpu_blocks_override=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        graph_mode=mode.value,
        capture_sizes=(1, 2, 4, 8, 64),
    )
    return load_engine(config, progress=lambda _: None)


def _dry_runner(engine: Engine, mode: GraphMode) -> ModelRunner:
    """The GPU's runner over the CPU engine's weights and cache."""
    decoder = engine.runner.decoder
    attention = TritonAttention(engine.kv_cache, TritonSettings(decoder.config.num_heads, 8))
    model = GraphModel(TritonDecoder(decoder.config, decoder.weights), attention, 512)
    options = GraphOptions(mode, (2, 4))
    return make_gpu_runner(model, options, 8, RunAgain(), lambda _: None)


def _tokens(
    engine: Engine, lengths: tuple[int, ...], num_outputs: int, is_async: bool = False
) -> list[list[int]]:
    sequences = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(0, SMALL["vocab_size"], (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=num_outputs)
        sequences.append(Sequence(str(number), 1, prompt, params, bytes(16)))
        engine.scheduler.add(sequences[-1])
    drive(engine, is_async=is_async)
    return [sequence.output_token_ids for sequence in sequences]
