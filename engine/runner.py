"""Runs one step on the device: from a StepBatch to sampled tokens.

Owns no bookkeeping: what to compute and where it goes comes with the batch, but for tokens that
the step before has just yielded. Runs on the device thread, one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.attention import AttentionBackend
from engine.batch import PendingResult, ScheduledSequence, StepBatch, StepResult
from engine.decoder import Decoder, LayerHook
from engine.graphs import GraphDispatcher
from engine.kv_cache import KVCache
from engine.last_tokens import LastTokens
from engine.padded_steps import GraphSteps, StepOutput
from engine.step_inputs import StepInputs, on_device
from engine.step_results import Pass, PendingTokens, RowSampler, StepResults


@dataclass(frozen=True)
class GraphPath:
    """Steps at fixed sizes, and which steps those are."""

    steps: GraphSteps
    dispatcher: GraphDispatcher


class ModelRunner:
    """A decoder, its KV cache and the attention between them.

    With `graphs`, steps of their sizes run there. With `sampler`, tokens are chosen on the
    device wherever a sequence's parameters allow it.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        attention: AttentionBackend,
        graphs: GraphPath | None = None,
        sampler: RowSampler | None = None,
    ) -> None:
        self.decoder = decoder
        self._cache = cache
        self._attention = attention
        self._graphs = graphs
        self._results = StepResults(decoder, sampler)
        self._block_size = cache.shape.block_size
        self._last = LastTokens(decoder.device)

    @torch.inference_mode()
    def execute(self, batch: StepBatch, after_layer: LayerHook | None = None) -> StepResult:
        """Computes the batch's tokens, fills their KV, samples where the batch says so.

        Decodes and prefill chunks run in one forward pass. `after_layer` is called on this
        thread each time one more layer's KV is complete in memory.
        A sequence whose logits are not finite gets no token.
        """
        done = self._compute(batch, after_layer)
        result = self._results.complete(done)
        self._last.keep_result(batch.sequences, result)
        self._wait_for_device()
        return result

    @torch.inference_mode()
    def launch(
        self, batch: StepBatch, after_layer: LayerHook | None = None
    ) -> StepResult | PendingResult:
        """The same, but where a device chooses all tokens it does not wait for them.

        The next step may be launched before the result is fetched, and no step more.
        """
        if not self._results.may_be_late(batch):
            return self.execute(batch, after_layer)
        done = self._compute(batch, after_layer)
        token_ids = self._results.late(done)
        self._last.keep(done.sampling, token_ids)
        return PendingTokens(done, token_ids)

    def _compute(self, batch: StepBatch, after_layer: LayerHook | None) -> Pass:
        # Single tokens first: they are attended together.
        order = sorted(
            range(len(batch.sequences)), key=lambda index: batch.sequences[index].num_tokens > 1
        )
        items = [batch.sequences[index] for index in order]
        self._cache.copy_blocks([pair for item in items for pair in self._copies(item)])
        if self._attention.reads_masked_keys:
            self._cache.zero_blocks([block for item in items for block in self._begun_blocks(item)])
        output = self._forward(items, after_layer)
        ends = accumulate(item.num_tokens for item in items)
        return Pass(batch, output, dict(zip(order, ends, strict=True)))

    def _forward(self, items: list[ScheduledSequence], after_layer: LayerHook | None) -> StepOutput:
        """The items' tokens, in their order, in one pass."""
        inputs = StepInputs.of(items, self._block_size, self._last.awaited(items))
        hook = self._synchronized(after_layer)
        if self._graphs is not None:
            key = self._graphs.dispatcher.dispatch(
                inputs.num_tokens, inputs.is_decode_only, hook is not None
            )
            if key is not None:
                return self._graphs.steps.run(key, inputs, items, hook)
        device = self.decoder.device
        input_ids = on_device(torch.tensor(inputs.input_ids), device)
        if inputs.awaited is not None:
            inputs.awaited.put_into(input_ids)
        hidden = self.decoder.forward(
            input_ids,
            on_device(torch.tensor(inputs.positions), device),
            self._attention.prepare(inputs.chunks, inputs.slots),
            hook,
        )
        return StepOutput(hidden)

    def _synchronized(self, after_layer: LayerHook | None) -> LayerHook | None:
        """The hook, delayed on a GPU until what was launched has run."""
        if after_layer is None or self.decoder.device.type == "cpu":
            return after_layer
        hook = after_layer

        def wait_and_call(num_layers: int) -> None:
            self._wait_for_device()
            hook(num_layers)

        return wait_and_call

    def _wait_for_device(self) -> None:
        """Until the KV of what was launched stands in memory, where a transfer may read it, and
        inputs that were on their way have left the host."""
        if self.decoder.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _copies(self, item: ScheduledSequence) -> list[tuple[int, int]]:
        """The copy of a shared block that the sequence is about to write to, if it needs one."""
        if item.copy_source is None:
            return []
        return [(item.copy_source, item.block_table[item.start // self._block_size])]

    def _begun_blocks(self, item: ScheduledSequence) -> list[int]:
        """The block that this step begins and leaves partly filled, if there is one."""
        end = item.start + item.num_tokens
        number, filled = divmod(end, self._block_size)
        if filled and number * self._block_size >= item.start:
            return [item.block_table[number]]
        return []
