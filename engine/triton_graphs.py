"""Steps of a GPU recorded once and replayed: whole ones, and the pieces between attentions.

All graphs share one memory pool and one set of input buffers. Replaying means: write the
step's inputs, the padding of all rows up to the graph's size included, and launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from engine.attention.triton import StepPlan, TritonAttention, TritonStep
from engine.decoder import LayerHook
from engine.device_sampler import DeviceSampler
from engine.graphs import GraphKey, GraphKind
from engine.kernels.decode_attention import DecodeRows
from engine.kernels.prefill_attention import PrefillRows, cut_into_tiles
from engine.padded_steps import StepOutput
from engine.sequence import Sequence
from engine.step_inputs import BlockTables, PersistentTensor, StepInputs, TokenBuffers
from engine.triton_decoder import Stream, TritonDecoder

Launch = Callable[[], None]


class Recorder(Protocol):
    """Turns device work into something that can be launched again."""

    def record(self, work: Launch) -> Launch:
        """Runs `work`, whose inputs and outputs have fixed places."""


class CudaRecorder:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Launch) -> Launch:
        """Runs `work` once before, so that nothing is compiled or loaded while recording."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            work()
        return graph.replay


@dataclass(frozen=True)
class GraphModel:
    """What the graphs run."""

    decoder: TritonDecoder
    attention: TritonAttention
    max_model_len: int

    @property
    def device(self) -> torch.device:
        return self.decoder.device


class _Buffers:
    """The inputs of every graph, for steps of up to `size` tokens."""

    def __init__(self, model: GraphModel, size: int) -> None:
        device = model.device
        block_size = model.attention.cache.shape.block_size
        num_columns = -(-model.max_model_len // block_size)
        self.tokens = TokenBuffers(size, device)
        self.tables = BlockTables(size, num_columns, device)
        self.lengths = PersistentTensor((size,), torch.int32, device)
        self.first_rows = PersistentTensor((size + 1,), torch.int32, device)
        self.starts = PersistentTensor((size,), torch.int32, device)
        self.tile_chunks = PersistentTensor((size,), torch.int32, device)
        self.tile_tokens = PersistentTensor((size,), torch.int32, device)

    def write(self, key: GraphKey, inputs: StepInputs, tile_tokens: int) -> None:
        """Everything that the graph of `key` reads but the parameters of sampling."""
        self.tokens.write(inputs, key.size)
        chunks = inputs.chunks
        if key.kind is GraphKind.PIECES:
            return
        self.tables.write([chunk.block_table for chunk in chunks])
        if key.kind is GraphKind.DECODE:
            self.lengths.write([chunk.end for chunk in chunks], key.size, 0)
            return
        counts = [chunk.num_tokens for chunk in chunks]
        tiles = cut_into_tiles(counts, tile_tokens)
        self.first_rows.write(list(accumulate(counts, initial=0)), key.size + 1, 0)
        self.starts.write([chunk.start for chunk in chunks], key.size, 0)
        self.tile_chunks.write([chunk for chunk, _ in tiles], key.size, -1)
        self.tile_tokens.write([first for _, first in tiles], key.size, 0)

    def clear(self, key: GraphKey, tile_tokens: int) -> None:
        """As for a step that is all padding."""
        self.write(key, StepInputs([], [], [], []), tile_tokens)

    def plan(self, key: GraphKey) -> StepPlan:
        """The graph's view of these buffers."""
        size = key.size
        slots = self.tokens.slots.device[:size]
        tables = self.tables.device[:size]
        if key.kind is GraphKind.DECODE:
            return StepPlan(slots, DecodeRows(tables, self.lengths.device[:size]), None)
        rows = PrefillRows(
            tables,
            self.first_rows.device[: size + 1],
            self.starts.device[:size],
            self.tile_chunks.device[:size],
            self.tile_tokens.device[:size],
        )
        return StepPlan(slots, None, rows)


@dataclass
class _Recorded:
    """A graph, or the pieces of one, and where they leave their results."""

    launches: list[Launch]
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    queries: list[torch.Tensor] | None = None
    """Of pieces: what each layer's attention reads."""


class RecordedSteps:
    """All graphs of one engine. Belongs to the device thread."""

    def __init__(self, model: GraphModel, recorder: Recorder, max_size: int) -> None:
        self._model = model
        self._recorder = recorder
        self._buffers = _Buffers(model, max_size)
        self._sampler = DeviceSampler(max_size, model.device)
        self._recorded: dict[GraphKey, _Recorded] = {}
        config = model.decoder.config
        dtype = model.decoder.weights.embedding.dtype
        self._attended = torch.zeros(max_size, config.q_size, dtype=dtype, device=model.device)

    @torch.inference_mode()
    def record(self, keys: Rows[GraphKey], progress: Callable[[str], None]) -> None:
        """Records all of `keys`, in their order, which is the largest first."""
        began = time.monotonic()
        for number, key in enumerate(keys, start=1):
            self._buffers.clear(key, self._model.attention.tile_tokens)
            self._sampler.write([], key.size)
            pieces = key.kind is GraphKind.PIECES
            self._recorded[key] = self._record_pieces(key) if pieces else self._record_step(key)
            progress(f"graph {number}/{len(keys)}: {key.kind.value}, {key.size} tokens")
        progress(f"{len(keys)} graphs recorded in {time.monotonic() - began:.1f} s")

    def run(
        self,
        key: GraphKey,
        inputs: StepInputs,
        sequences: Rows[Sequence],
        after_layer: LayerHook | None,
    ) -> StepOutput:
        """See GraphSteps."""
        recorded = self._recorded[key]
        self._buffers.write(key, inputs, self._model.attention.tile_tokens)
        if recorded.queries is not None:
            self._run_pieces(recorded, recorded.queries, inputs, after_layer)
        else:
            if recorded.tokens is not None:
                self._sampler.write(sequences, key.size)
            for launch in recorded.launches:
                launch()
        count = inputs.num_tokens
        return StepOutput(
            recorded.hidden[:count],
            None if recorded.logits is None else recorded.logits[:count],
            None if recorded.tokens is None else recorded.tokens[:count],
        )

    def _step(self, key: GraphKey) -> TritonStep:
        attention = self._model.attention
        return TritonStep(attention.cache, attention.settings, self._buffers.plan(key))

    def _record_step(self, key: GraphKey) -> _Recorded:
        decoder, tokens = self._model.decoder, self._buffers.tokens
        input_ids = tokens.input_ids.device[: key.size]
        positions = tokens.positions.device[: key.size]
        step = self._step(key)
        dtype, config = decoder.weights.embedding.dtype, decoder.config
        samples = key.kind is GraphKind.DECODE
        recorded = _Recorded([], self._empty(key.size, config.hidden_size, dtype))
        if samples:
            recorded.logits = self._empty(key.size, config.vocab_size, dtype)
            recorded.tokens = torch.zeros(key.size, dtype=torch.int32, device=decoder.device)

        def work() -> None:
            hidden = decoder.forward(input_ids, positions, step)
            recorded.hidden.copy_(hidden)
            if recorded.logits is not None and recorded.tokens is not None:
                recorded.logits.copy_(decoder.logits(hidden))
                recorded.tokens.copy_(self._sampler.sample(recorded.logits))

        recorded.launches.append(self._recorder.record(work))
        return recorded

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, columns, dtype=dtype, device=self._model.device)

    def _record_pieces(self, key: GraphKey) -> _Recorded:
        """One piece more than there are layers; attention i runs between pieces i and i + 1."""
        decoder, tokens = self._model.decoder, self._buffers.tokens
        input_ids = tokens.input_ids.device[: key.size]
        positions = tokens.positions.device[: key.size]
        attended = self._attended[: key.size]
        config, step = decoder.config, self._step(key)
        dtype = decoder.weights.embedding.dtype
        hidden = self._empty(key.size, config.hidden_size, dtype)
        query_shape = (key.size, config.num_heads, config.head_dim)
        queries = [
            torch.zeros(query_shape, dtype=dtype, device=decoder.device)
            for _ in range(config.num_layers)
        ]
        streams: list[Stream] = []

        def first() -> None:
            streams[:] = [decoder.begin(input_ids, positions, step.plan.slots)]
            queries[0].copy_(decoder.before_attention(0, streams[0], step))

        def between(layer: int) -> None:
            decoder.after_attention(layer - 1, streams[0], attended)
            queries[layer].copy_(decoder.before_attention(layer, streams[0], step))

        def last() -> None:
            decoder.after_attention(config.num_layers - 1, streams[0], attended)
            hidden.copy_(streams[0].residual)

        launches = [self._recorder.record(first)]
        for layer in range(1, config.num_layers):
            launches.append(self._recorder.record(partial(between, layer)))
        launches.append(self._recorder.record(last))
        return _Recorded(launches, hidden, queries=queries)

    def _run_pieces(
        self,
        recorded: _Recorded,
        queries: list[torch.Tensor],
        inputs: StepInputs,
        after_layer: LayerHook | None,
    ) -> None:
        count = inputs.num_tokens
        step = self._model.attention.prepare(inputs.chunks, inputs.slots)
        recorded.launches[0]()
        for layer, window in enumerate(self._model.decoder.config.windows):
            query = queries[layer][:count]
            self._attended[:count] = step.attend_written(layer, query, window)
            if after_layer is not None:
                after_layer(layer + 1)
            recorded.launches[layer + 1]()
