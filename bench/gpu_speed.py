"""What bench.gpu measures: decode, prefill, recording and memory of a model of 8B shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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
from bench.report import Reporter
from engine.batch import StepBatch
from engine.gpu_runner import GpuModel, make_gpu_runner, measure_graph_bytes
from engine.graphs import GraphMode, GraphOptions, default_capture_sizes
from engine.runner import ModelRunner
from engine.triton_graphs import CudaRecorder, GraphModel, Recorder


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    is_dry: bool
    context: int
    batch_sizes: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int


FULL = Plan(False, 1024, (1, 2, 4, 8, 16, 32, 64), (512, 2048, 8192), 10)
DRY = Plan(True, 40, (1, 3), (70,), 1)


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
    if not plan.is_dry:
        _measure_budget(reporter, model, max(plan.batch_sizes))
    free, began = free_bytes(device), time.monotonic()
    recorder: Recorder = RunAgain() if plan.is_dry else CudaRecorder()
    graphs = _runner(model, plan, GraphMode.FULL_DECODE_ONLY, recorder)
    reporter.row(
        part="recording", seconds=time.monotonic() - began, mib=(free - free_bytes(device)) / 2**20
    )
    _measure_decode(reporter, plan, model, (eager, graphs), rates)
    _measure_prefill(reporter, plan, model, eager, rates)


def _measure_budget(reporter: Reporter, model: GraphModel, max_num_seqs: int) -> None:
    """What a worker would take for KV blocks beside what this process holds."""
    options = GraphOptions(GraphMode.FULL_DECODE_ONLY, default_capture_sizes(max_num_seqs))
    graphs = measure_graph_bytes(model, options, CudaRecorder(), lambda: free_bytes(model.device))
    decoder, cache = model.decoder, model.attention.cache
    gpu = GpuModel(decoder.config, decoder.weights, cache.shape, model.max_model_len, options)
    budget = gpu.kv_budget(2048, max_num_seqs, 0.9)
    reporter.row(
        part="memory",
        graphs_estimate_mib=graphs / 2**20,
        kv_budget_gib=budget.num_bytes / 2**30,
    )
    reporter.check("memory left for KV blocks", budget.num_bytes / 2**30, "GiB", "> 0")


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
