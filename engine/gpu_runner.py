"""Puts a GPU's runner together, its graphs recorded; and how much memory graphs will take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from engine.attention import SequenceChunk
from engine.attention.triton import TritonAttention, TritonSettings
from engine.decoder import DecoderWeights
from engine.device_sampler import DeviceSampler
from engine.graphs import GraphDispatcher, GraphOptions
from engine.kv_cache import BlockShape, KVCache, MemoryBudget, gpu_budget
from engine.model_config import ModelConfig
from engine.runner import GraphPath, ModelRunner
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import CudaRecorder, GraphModel, RecordedSteps, Recorder

Progress = Callable[[str], None]


class GpuModel:
    """A model whose weights lie on a GPU, before and after there is a KV cache for it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        shape: BlockShape,
        max_model_len: int,
        options: GraphOptions,
    ) -> None:
        self._decoder = TritonDecoder(config, weights)
        self._shape = shape
        self._max_model_len = max_model_len
        self._options = options

    def kv_budget(self, max_num_tokens: int, max_num_seqs: int, share: float) -> MemoryBudget:
        """Memory for KV blocks if the whole may take `share` of the GPU.

        What a step takes and what graphs take is measured over a cache of one block, which is
        gone again when this returns: neither grows with the cache.
        """
        device = self._decoder.device
        model = self._on(KVCache(self._shape, 1, device))
        run_largest_step(model, max_num_tokens, max_num_seqs)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run_largest_step(model, max_num_tokens, max_num_seqs)
        reserved = torch.cuda.max_memory_allocated(device) - before
        reserved += measure_graph_bytes(
            model, self._options, CudaRecorder(), lambda: _free_bytes(device)
        )
        del model
        free = _free_bytes(device)
        total = torch.cuda.mem_get_info(device)[1]
        return gpu_budget(total, free, reserved, share)

    def make_runner(self, cache: KVCache, max_num_seqs: int, progress: Progress) -> ModelRunner:
        """Records all graphs over `cache`: seconds to minutes, told to `progress`."""
        model = self._on(cache)
        return make_gpu_runner(model, self._options, max_num_seqs, CudaRecorder(), progress)

    def _on(self, cache: KVCache) -> GraphModel:
        properties = torch.cuda.get_device_properties(self._decoder.device)
        settings = TritonSettings(self._decoder.config.num_heads, properties.multi_processor_count)
        return GraphModel(self._decoder, TritonAttention(cache, settings), self._max_model_len)


def make_gpu_runner(
    model: GraphModel,
    options: GraphOptions,
    max_num_seqs: int,
    recorder: Recorder,
    progress: Progress,
) -> ModelRunner:
    """A runner of the model's steps, its graphs recorded by `recorder`."""
    dispatcher = GraphDispatcher(options)
    graphs = None
    if keys := dispatcher.keys():
        steps = RecordedSteps(model, recorder, dispatcher.largest)
        steps.record(keys, progress)
        graphs = GraphPath(steps, dispatcher)
    sampler = DeviceSampler(max_num_seqs, model.device)
    return ModelRunner(model.decoder, model.attention.cache, model.attention, graphs, sampler)


@torch.inference_mode()
def run_largest_step(model: GraphModel, num_tokens: int, num_rows: int) -> None:
    """The pass that takes most memory: one prompt of `num_tokens`, logits of `num_rows` of them.

    Writes no KV, and reads that of block 0 for every position.
    """
    num_tokens = min(num_tokens, model.max_model_len)
    block_size = model.attention.cache.shape.block_size
    chunk = SequenceChunk(0, num_tokens, [0] * -(-num_tokens // block_size))
    positions = torch.arange(num_tokens, device=model.device)
    attention = model.attention.prepare([chunk], [-1] * num_tokens)
    hidden = model.decoder.forward(torch.zeros_like(positions), positions, attention)
    model.decoder.logits(hidden[:num_rows])


def measure_graph_bytes(
    model: GraphModel, options: GraphOptions, recorder: Recorder, free_bytes: Callable[[], int]
) -> int:
    """Estimates the memory of all graphs by recording those of the two largest sizes.

    The first make the pool; those of each later size are smaller and add at most what the
    second did.
    """
    dispatcher = GraphDispatcher(options)
    keys = dispatcher.keys()
    if not keys:
        return 0
    free = [free_bytes()]
    steps = RecordedSteps(model, recorder, dispatcher.largest)
    num_kinds = len({key.kind for key in keys})
    for first in (0, num_kinds):
        steps.record(keys[first : first + num_kinds], lambda _: None)
        free.append(free_bytes())
    largest, second = (max(0, before - after) for before, after in pairwise(free))
    return largest + (len(keys) // num_kinds - 1) * second


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
