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
from engine.batch import ScheduledSequence
from engine.decoder import LayerHook
from engine.device_sampler import DeviceSampler
from engine.graphs import GraphKey, GraphKind
from engine.kernels.decode_attention import DecodeRows
from engine.kernels.prefill_attention import PrefillRows, cut_into_tiles
from engine.padded_steps import StepOutput
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


class _Inputs:
    """The inputs of every graph, for steps of up to `size` tokens."""

    def __init__(self, model: GraphModel, size: int) -> None:
        device = model.device
        self._tile_tokens = model.attention.tile_tokens
        block_size = model.attention.cache.shape.block_size
        num_columns = -(-model.max_model_len // block_size)
        self.tokens = TokenBuffers(size, device)
        self.tables = BlockTables(size, num_columns, device)
        self.lengths = PersistentTensor((size,), torch.int32, device)
        self.first_rows = PersistentTensor((size + 1,), torch.int32, device)
        self.starts = PersistentTensor((size,), torch.int32, device)
        self.tile_chunks = PersistentTensor((size,), torch.int32, device)
        self.tile_tokens = PersistentTensor((size,), torch.int32, device)

    def ids_and_positions(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first `size` tokens."""
        return self.tokens.input_ids.device[:size], self.tokens.positions.device[:size]

    def write(self, key: GraphKey, inputs: StepInputs) -> None:
        """All that the graph of `key` reads but the parameters of sampling, padding included."""
        self.tokens.write(inputs, key.size)
        chunks = inputs.chunks
        if key.kind is GraphKind.PIECES:
            return
        self.tables.write([chunk.block_table for chunk in chunks])
        if key.kind is GraphKind.DECODE:
            self.lengths.write([chunk.end for chunk in chunks], key.size, 0)
            return
        counts = [chunk.num_tokens for chunk in chunks]
        tiles = cut_into_tiles(counts, self._tile_tokens)
        self.first_rows.write(list(accumulate(counts, initial=0)), key.size + 1, 0)
        self.starts.write([chunk.start for chunk in chunks], key.size, 0)
        self.tile_chunks.write([chunk for chunk, _ in tiles], key.size, -1)
        self.tile_tokens.write([first for _, first in tiles], key.size, 0)

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


class _Outputs:
    """Where every graph leaves its results, for steps of up to `size` tokens."""

    def __init__(self, model: GraphModel, size: int) -> None:
        config = model.decoder.config
        self._options = {
            "dtype": model.decoder.weights.embedding.dtype,
            "device": model.device,
        }
        self.hidden = self._zeros(size, config.hidden_size)
        self.logits = self._zeros(size, config.vocab_size)
        self.tokens = torch.zeros(size, dtype=torch.int32, device=model.device)
        self.query = self._zeros(size, config.num_heads, config.head_dim)
        """Of pieces: what the attention that comes next reads, and below what it writes."""
        self.attended = self._zeros(size, config.q_size)

    def _zeros(self, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, **self._options)  # type: ignore[call-overload,no-any-return]


class RecordedSteps:
    """All graphs of one engine. Belongs to the device thread."""

    def __init__(self, model: GraphModel, recorder: Recorder, max_size: int) -> None:
        self._model = model
        self._recorder = recorder
        self._inputs = _Inputs(model, max_size)
        self._outputs = _Outputs(model, max_size)
        self._sampler = DeviceSampler(max_size, model.device)
        self._launches: dict[GraphKey, list[Launch]] = {}

    @torch.inference_mode()
    def record(self, keys: Rows[GraphKey], progress: Callable[[str], None]) -> None:
        """Records all of `keys`, in their order, which is the largest first."""
        began = time.monotonic()
        for number, key in enumerate(keys, start=1):
            self._inputs.write(key, StepInputs([], [], [], []))
            self._sampler.write([], key.size)
            works = self._pieces(key) if key.kind is GraphKind.PIECES else [self._step_work(key)]
            self._launches[key] = [self._recorder.record(work) for work in works]
            progress(f"graph {number}/{len(keys)}: {key.kind.value}, {key.size} tokens")
        progress(f"{len(keys)} graphs recorded in {time.monotonic() - began:.1f} s")

    def run(
        self,
        key: GraphKey,
        inputs: StepInputs,
        items: Rows[ScheduledSequence],
        after_layer: LayerHook | None,
    ) -> StepOutput:
        """See GraphSteps."""
        self._inputs.write(key, inputs)
        outputs, count = self._outputs, inputs.num_tokens
        if key.kind is GraphKind.DECODE:
            self._sampler.write(items, key.size)
            self._launches[key][0]()
            return StepOutput(
                outputs.hidden[:count], outputs.logits[:count], outputs.tokens[:count], key
            )
        if key.kind is GraphKind.MIXED:
            self._launches[key][0]()
        else:
            self._run_pieces(self._launches[key], inputs, after_layer)
        return StepOutput(outputs.hidden[:count], graph=key)

    def _step_work(self, key: GraphKey) -> Launch:
        """A whole step, with logits and tokens where each row is a sequence's newest."""
        decoder, outputs, size = self._model.decoder, self._outputs, key.size
        input_ids, positions = self._inputs.ids_and_positions(size)
        step = self._attention_of(key)

        def work() -> None:
            hidden = decoder.forward(input_ids, positions, step)
            outputs.hidden[:size] = hidden
            if key.kind is GraphKind.DECODE:
                logits = decoder.logits(hidden)
                outputs.logits[:size] = logits
                outputs.tokens[:size] = self._sampler.sample(logits)

        return work

    def _pieces(self, key: GraphKey) -> list[Launch]:
        """One piece more than there are layers; attention i runs between pieces i and i + 1."""
        decoder, outputs, size = self._model.decoder, self._outputs, key.size
        input_ids, positions = self._inputs.ids_and_positions(size)
        step = self._attention_of(key)
        num_layers = decoder.config.num_layers
        streams: list[Stream] = []

        def piece(layer: int) -> None:
            """From behind the attention of the layer before to that of `layer`."""
            if layer == 0:
                streams[:] = [decoder.begin(input_ids, positions, step.plan.slots)]
            else:
                decoder.after_attention(layer - 1, streams[0], outputs.attended[:size])
            if layer < num_layers:
                outputs.query[:size] = decoder.before_attention(layer, streams[0], step)
            else:
                outputs.hidden[:size] = streams[0].residual

        return [partial(piece, layer) for layer in range(num_layers + 1)]

    def _run_pieces(
        self, launches: list[Launch], inputs: StepInputs, after_layer: LayerHook | None
    ) -> None:
        count = inputs.num_tokens
        query, attended = self._outputs.query[:count], self._outputs.attended[:count]
        step = self._model.attention.prepare(inputs.chunks, inputs.slots)
        launches[0]()
        for layer, window in enumerate(self._model.decoder.config.windows):
            attended.copy_(step.attend_written(layer, query, window))
            if after_layer is not None:
                after_layer(layer + 1)
            launches[layer + 1]()

    def _attention_of(self, key: GraphKey) -> TritonStep:
        attention = self._model.attention
        return TritonStep(attention.cache, attention.settings, self._inputs.plan(key))
