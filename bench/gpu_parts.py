"""The parts of bench.gpu, in the order in which it runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_model import (
    BLOCK_SIZE,
    LLAMA_8B,
    TINY,
    Rates,
    RunAgain,
    decode_bytes,
    decode_step,
    prefill_flop,
    prefill_step,
    random_model,
)
from bench.gpu_timing import free_bytes, measure_rates, median_s
from bench.kernel_cases import AttentionCase, attention_sweep
from bench.kernel_row_cases import RotaryCase, RowCase, SamplingCase
from bench.random_model import write_random_model
from bench.report import Reporter
from core.sampling import SamplingParams
from engine.attention.triton import TritonAttention, TritonSettings
from engine.batch import StepBatch
from engine.engine import Engine, EngineConfig, load_engine
from engine.gpu_runner import make_gpu_runner
from engine.graphs import GraphMode, GraphOptions, default_capture_sizes
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import CudaRecorder, GraphModel, Recorder

if TYPE_CHECKING:
    from bench.gpu import Plan

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
    reporter.check("draws other than the sampler's", num_other, "draws", "== 0")


def _cases(is_dry: bool) -> Iterator[AttentionCase | RotaryCase | RowCase]:
    """Of the attention's sweep every shape once in bfloat16, some in the other dtypes."""
    if is_dry:
        yield AttentionCase(((40, 1), (-1, 1), (0, 20)), num_processors=8)
        yield RotaryCase()
        yield RowCase("norm", 576)
        yield RowCase("gate", 576)
        return
    yield from attention_sweep((torch.bfloat16,))[::2]
    yield from attention_sweep((torch.float16, torch.float32))[3::14]
    long = ((8191, 1), (4000, 1), (-1, 1), (1024, 512))
    yield AttentionCase(long, 32, 8, 128, dtype=torch.bfloat16, num_processors=132)
    for dtype in (torch.float32, *HALVES):
        for has_norms in (False, True):
            yield RotaryCase(32, 8, 128, has_norms=has_norms, dtype=dtype)
        for size in (576, 4096):
            yield RowCase("norm", size, dtype)
            yield RowCase("gate", size, dtype)


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
        tokens = _tokens(engine, lengths, num_outputs)
        num_equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        reporter.row(
            part="tokens",
            mode=mode.value,
            prompts=len(lengths),
            equal=num_equal,
            seconds=time.monotonic() - began,
        )
        share = num_equal / len(lengths)
        reporter.check(f"prompts with the CPU's tokens, {mode.value}", share, "share", "== 1")


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


def _tokens(engine: Engine, lengths: tuple[int, ...], num_outputs: int) -> list[list[int]]:
    sequences = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(0, SMALL["vocab_size"], (length,), generator=generator).tolist()
        params = SamplingParams(max_tokens=num_outputs)
        sequences.append(Sequence(str(number), 1, prompt, params, bytes(16)))
        engine.scheduler.add(sequences[-1])
    while (batch := engine.scheduler.schedule()) is not None:
        engine.scheduler.postprocess(batch, engine.runner.execute(batch))
    return [sequence.output_token_ids for sequence in sequences]


def measure_speed(reporter: Reporter, plan: Plan, device: torch.device) -> None:
    """Decode, prefill and recording of a model of 8B shape."""
    dtype = torch.float32 if plan.is_dry else torch.bfloat16
    with torch.inference_mode():
        rates = measure_rates(device, dtype)
    reporter.row(
        part="device", gib_per_s=rates.bytes_per_s / 2**30, tflop_per_s=rates.flop_per_s / 1e12
    )
    num_tokens = max(plan.context * max(plan.batch_sizes), *plan.prompts)
    num_blocks = num_tokens // BLOCK_SIZE + max(plan.batch_sizes)
    with torch.inference_mode():
        raw = TINY if plan.is_dry else LLAMA_8B
        model = random_model(raw, num_blocks, dtype, device)
    eager = _runner(model, plan, GraphMode.NONE, RunAgain())
    free, began = free_bytes(device), time.monotonic()
    recorder: Recorder = RunAgain() if plan.is_dry else CudaRecorder()
    graphs = _runner(model, plan, GraphMode.FULL_DECODE_ONLY, recorder)
    reporter.row(
        part="recording", seconds=time.monotonic() - began, mib=(free - free_bytes(device)) / 2**20
    )
    _measure_decode(reporter, plan, model, (eager, graphs), rates)
    _measure_prefill(reporter, plan, model, eager, rates)


def _runner(model: GraphModel, plan: Plan, mode: GraphMode, recorder: Recorder) -> ModelRunner:
    most = max(plan.batch_sizes)
    options = GraphOptions(mode, default_capture_sizes(most))
    return make_gpu_runner(model, options, most, recorder, lambda _: None)


def _measure_decode(
    reporter: Reporter,
    plan: Plan,
    model: GraphModel,
    runners: tuple[ModelRunner, ModelRunner],
    rates: Rates,
) -> None:
    """Whole steps as the engine runs them: inputs, forward pass, sampling, tokens on the host."""
    config, device = model.decoder.config, model.device
    itemsize = model.attention.cache.shape.dtype.itemsize
    for num_rows in plan.batch_sizes:
        batch = decode_step(num_rows, plan.context)
        eager_s, graph_s = (
            median_s(_executing(runner, batch), device, plan.repeats) for runner in runners
        )
        floor_s = decode_bytes(config, num_rows, plan.context, itemsize) / rates.bytes_per_s
        reporter.row(
            part="decode",
            batch=num_rows,
            context=plan.context,
            eager_ms=1e3 * eager_s,
            graph_ms=1e3 * graph_s,
            floor_ms=1e3 * floor_s,
            ratio=graph_s / floor_s,
        )
        if not plan.is_dry:
            name = f"decode step over its floor, batch {num_rows}"
            reporter.check(name, graph_s / floor_s, "", "<= 1.25")


def _measure_prefill(
    reporter: Reporter, plan: Plan, model: GraphModel, runner: ModelRunner, rates: Rates
) -> None:
    for num_tokens in plan.prompts:
        seconds = median_s(_executing(runner, prefill_step(num_tokens)), model.device, plan.repeats)
        rate = prefill_flop(model.decoder.config, num_tokens) / seconds
        share = rate / rates.flop_per_s
        reporter.row(
            part="prefill",
            prompt=num_tokens,
            ms=1e3 * seconds,
            tokens_per_s=num_tokens / seconds,
            share=share,
        )
        if not plan.is_dry and num_tokens >= 2048:
            name = f"prefill over the matrix rate, {num_tokens} tokens"
            reporter.check(name, share, "", ">= 0.6")


def _executing(runner: ModelRunner, batch: StepBatch) -> Callable[[], object]:
    return lambda: runner.execute(batch)
