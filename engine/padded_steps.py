"""Steps at the sizes of graphs on a device that has none: the same buffers, the same padding.

Costs time and gains nothing but this: what padding could break, breaks on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention import AttentionBackend, StepAttention
from engine.batch import ScheduledSequence
from engine.decoder import Decoder, LayerHook
from engine.graphs import GraphKey
from engine.step_inputs import StepInputs, TokenBuffers


@dataclass(frozen=True)
class StepOutput:
    """What a forward pass leaves; valid until the next. Rows that pad are cut off."""

    hidden: torch.Tensor
    """[tokens, hidden_size], before the final norm."""
    logits: torch.Tensor | None = None
    """[tokens, vocab_size], where the pass computed them."""
    tokens: torch.Tensor | None = None
    """int32 [tokens]: the next tokens of those that are sampled on the device, likewise."""
    graph: GraphKey | None = None
    """The one that the pass was replayed in."""


class GraphSteps(Protocol):
    """Runs steps at fixed sizes."""

    def run(
        self,
        key: GraphKey,
        inputs: StepInputs,
        items: Rows[ScheduledSequence],
        after_layer: LayerHook | None,
    ) -> StepOutput:
        """One forward pass. `items` are those of the inputs' chunks."""


class PaddedSteps:
    """Runs the decoder itself, over padded inputs."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, max_size: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._buffers = TokenBuffers(max_size, decoder.device)

    def run(
        self,
        key: GraphKey,
        inputs: StepInputs,
        items: Rows[ScheduledSequence],
        after_layer: LayerHook | None,
    ) -> StepOutput:
        """See GraphSteps."""
        self._buffers.write(inputs, key.size)
        attention = self._attention.prepare(inputs.chunks, inputs.slots)
        hidden = self._decoder.forward(
            self._buffers.input_ids.device[: key.size],
            self._buffers.positions.device[: key.size],
            _PaddedAttention(attention, inputs.num_tokens),
            after_layer,
        )
        return StepOutput(hidden[: inputs.num_tokens], graph=key)


class _PaddedAttention(StepAttention):
    """Attends the rows that do not pad; the result of those that do is zero."""

    def __init__(self, attention: StepAttention, num_tokens: int) -> None:
        self._attention = attention
        self._num_tokens = num_tokens

    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        count = self._num_tokens
        attended = self._attention.attend(layer, query[:count], key_value[:count], window)
        output = attended.new_zeros(len(query), attended.shape[1])
        output[:count] = attended
        return output
