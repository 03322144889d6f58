"""Assembles an engine: model, KV cache, runner, block pool and scheduler, in that order."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.errors import StartupError
from engine.attention import AttentionBackend
from engine.block_pool import BlockPool
from engine.cpu_kernels import choose_kernels
from engine.decoder import Decoder, DecoderWeights
from engine.graphs import GraphDispatcher, GraphOptions
from engine.kv_cache import (
    BlockShape,
    KVCache,
    MemoryBudget,
    available_memory,
    cpu_budget,
    decide_num_blocks,
)
from engine.model_config import ModelConfig
from engine.padded_steps import PaddedSteps
from engine.runner import GraphPath, ModelRunner
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.weights import load_weights

if TYPE_CHECKING:
    from engine.gpu_runner import GpuModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the operator chooses; None leaves the choice to the engine."""

    model: Path
    """A Hugging Face model folder."""
    dtype: str = "auto"
    """"float32", "bfloat16", "float16", or "auto": as the folder declares, else float32."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    """Longest sequence, in tokens. None: the model's context length."""
    max_num_seqs: int = SchedulerConfig.max_num_seqs
    max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens
    max_prefill_tokens_beside_decodes: int | None = None
    max_num_partial_prefills: int = SchedulerConfig.max_num_partial_prefills
    max_long_partial_prefills: int = SchedulerConfig.max_long_partial_prefills
    long_prefill_token_threshold: int = SchedulerConfig.long_prefill_token_threshold
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, steps, graphs and KV blocks may take together."""
    graph_mode: str = "auto"
    """A name of `engine.graphs.GraphMode`, or "auto": FULL_DECODE_ONLY on a GPU, else NONE. On a
    CPU nothing is recorded: steps are padded as they would be, for tests."""
    capture_sizes: tuple[int, ...] | None = None
    """Sizes of graphs, in tokens. None: 1, 2, 4, 8, 16, 24 and so on up to `max_num_seqs`."""
    num_threads: int | None = None
    """Threads of one tensor operation on a CPU. None: PyTorch's choice."""
    cpu_kernels: str = "auto"
    """On a CPU, "native": compiled for this machine, "torch": PyTorch's own, "auto": compiled
    ones where they can be had."""


@dataclass(frozen=True)
class Engine:
    """The parts of a running engine. `pool` and `scheduler` belong to the event loop thread,
    `runner` to the device thread."""

    config: EngineConfig
    model_config: ModelConfig
    dtype: str
    """Of weights and KV cache: never "auto"."""
    max_model_len: int
    """Longest sequence: the least of the model's context, the wish, and the whole pool."""
    kv_cache: KVCache
    runner: ModelRunner
    pool: BlockPool
    scheduler: Scheduler


def load_engine(config: EngineConfig, progress: Callable[[str], None]) -> Engine:
    """Loads the model and allocates its memory; seconds to minutes, telling `progress`.

    Call it on the thread that will run the steps: `num_threads` holds for the calling
    thread. Raises StartupError in one line.
    """
    model_config = ModelConfig.from_folder(config.model)
    dtype = _resolve_dtype(config.dtype, model_config.dtype)
    device = _resolve_device(config.device)
    context_length = _resolve_context(config.max_model_len, model_config)
    options = GraphOptions.resolve(
        config.graph_mode, config.capture_sizes, config.max_num_seqs, device.type == "cuda"
    )
    if config.num_threads is not None:
        if config.num_threads < 1:
            raise StartupError(f"num_threads must be at least 1, is {config.num_threads}")
        torch.set_num_threads(config.num_threads)
    began = time.monotonic()
    kernels = choose_kernels(config.cpu_kernels, _DTYPES[dtype], device, progress)
    weights = load_weights(
        config.model, model_config, _DTYPES[dtype], device, progress, kernels.pack
    )
    progress(
        f"weights loaded in {time.monotonic() - began:.1f} s ({dtype}, {device}), "
        f"peak memory {_peak_bytes(device) / 2**20:.0f} MiB"
    )
    shape = _block_shape(config, model_config, _DTYPES[dtype])
    gpu = _load_gpu(model_config, weights, shape, context_length, options)
    kv_cache = _allocate_kv_cache(config, shape, device, gpu)
    progress(
        f"KV cache: {kv_cache.num_blocks} blocks of {config.block_size} tokens, "
        f"{kv_cache.num_bytes / 2**20:.0f} MiB"
    )
    pool = BlockPool(kv_cache.num_blocks, config.block_size)
    max_model_len = min(context_length, kv_cache.num_blocks * config.block_size)
    if gpu is not None:
        runner = gpu.make_runner(kv_cache, config.max_num_seqs, progress)
    else:
        attention = kernels.attention(kv_cache, model_config.num_heads, progress)
        decoder = Decoder(model_config, weights, kernels.ops)
        runner = _cpu_runner(decoder, attention, options, kv_cache)
    return Engine(
        config=config,
        model_config=model_config,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_cache=kv_cache,
        runner=runner,
        pool=pool,
        scheduler=Scheduler(_scheduler_config(config, max_model_len), pool),
    )


def _resolve_dtype(wanted: str, declared: str | None) -> str:
    if wanted == "auto":
        return declared or "float32"
    if wanted not in _DTYPES:
        supported = ", ".join(("auto", *_DTYPES))
        raise StartupError(f"dtype {wanted} is not supported; supported: {supported}")
    return wanted


def _resolve_device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise StartupError(f"device {name} is not supported; supported: cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda is not available: no GPU, or PyTorch without CUDA")
    return torch.device(name)


def _resolve_context(wanted: int | None, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if wanted is None:
        return limit
    if not 0 < wanted <= limit:
        raise StartupError(
            f"max_model_len {wanted} must be between 1 and the model's context length {limit} "
            f"(rope type {model_config.rope.rope_type})"
        )
    return wanted


def _load_gpu(
    model_config: ModelConfig,
    weights: DecoderWeights,
    shape: BlockShape,
    max_model_len: int,
    options: GraphOptions,
) -> GpuModel | None:
    """The GPU's part of the engine; None where the weights lie on a CPU."""
    if weights.embedding.device.type != "cuda":
        return None
    from engine.gpu_runner import GpuModel  # Needs Triton, which a CPU does not.

    return GpuModel(model_config, weights, shape, max_model_len, options)


def _cpu_runner(
    decoder: Decoder, attention: AttentionBackend, options: GraphOptions, cache: KVCache
) -> ModelRunner:
    dispatcher = GraphDispatcher(options)
    graphs = None
    if dispatcher.keys():
        graphs = GraphPath(PaddedSteps(decoder, attention, dispatcher.largest), dispatcher)
    return ModelRunner(decoder, cache, attention, graphs)


def _block_shape(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> BlockShape:
    if config.block_size < 1:
        raise StartupError(f"block_size must be at least 1, is {config.block_size}")
    return BlockShape(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        block_size=config.block_size,
        head_dim=model_config.head_dim,
        dtype=dtype,
    )


def _peak_bytes(device: torch.device) -> int:
    """The most memory that was in use so far: on a GPU by torch, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _allocate_kv_cache(
    config: EngineConfig, shape: BlockShape, device: torch.device, gpu: GpuModel | None
) -> KVCache:
    def default() -> MemoryBudget:
        if gpu is None:
            return cpu_budget(available_memory())
        return gpu.kv_budget(
            config.max_num_batched_tokens, config.max_num_seqs, config.gpu_memory_utilization
        )

    num_blocks = decide_num_blocks(
        shape.num_bytes,
        config.num_gpu_blocks_override,
        config.kv_cache_memory_bytes,
        default,
    )
    try:
        return KVCache(shape, num_blocks, device)
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        raise StartupError(
            f"cannot allocate {num_blocks} KV blocks of {shape.num_bytes} bytes on {device}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _scheduler_config(config: EngineConfig, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens_beside_decodes=config.max_prefill_tokens_beside_decodes,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )
