"""The decoder with the kernels of a GPU; the same function as `engine.decoder`.

A pass is cut where attention reads the cache: `begin`, then for every layer `before_attention`,
attention, `after_attention`. What lies between two attentions depends on the number of tokens
alone, which is what piecewise graphs capture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from engine.attention import StepAttention
from engine.attention.triton import TritonStep
from engine.decoder import Decoder, DecoderWeights, LayerHook
from engine.kernels.activation import silu_and_multiply
from engine.kernels.norms import add_rms_norm, rms_norm
from engine.kernels.rotary_write import HeadNorms, RotaryRows, rotate_and_write
from engine.model_config import ModelConfig


@dataclass
class Stream:
    """What flows from piece to piece of one pass."""

    residual: torch.Tensor
    """[T, hidden_size], changed in place."""
    normed: torch.Tensor
    """[T, hidden_size]: what the next projection reads."""
    rotary: RotaryRows


class TritonDecoder(Decoder):
    """Runs on whatever device Triton runs on."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        super().__init__(config, weights)
        self._head_norms = tuple(
            HeadNorms(layer.q_norm, layer.k_norm, config.rms_norm_eps)
            if layer.q_norm is not None and layer.k_norm is not None
            else None
            for layer in weights.layers
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward. `attention` is a TritonStep."""
        assert isinstance(attention, TritonStep)
        stream = self.begin(input_ids, positions, attention.plan.slots)
        for index, window in enumerate(self.config.windows):
            query = self.before_attention(index, stream, attention)
            attended = attention.attend_written(index, query, window)
            if after_layer is not None:
                after_layer(index + 1)
            self.after_attention(index, stream, attended)
        return stream.residual

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> Stream:
        """Embeddings, and what all layers use."""
        residual = embedding(input_ids, self.weights.embedding)
        norm = self.weights.layers[0].input_norm
        normed = rms_norm(residual, norm, self.config.rms_norm_eps)
        cos, sin = self._rope.cos_sin(positions)
        return Stream(residual, normed, RotaryRows(cos, sin, slots))

    def before_attention(self, index: int, stream: Stream, attention: TritonStep) -> torch.Tensor:
        """Queries [T, num_heads, head_dim] of a layer; its keys and values stand in the cache."""
        qkv = self.weights.layers[index].qkv(stream.normed)
        cache, scales = attention.layer_cache(index), attention.layer_scales(index)
        return rotate_and_write(qkv, cache, stream.rotary, self._head_norms[index], scales)

    def after_attention(self, index: int, stream: Stream, attended: torch.Tensor) -> None:
        """The rest of a layer, and the norm that begins the next."""
        layer, epsilon = self.weights.layers[index], self.config.rms_norm_eps
        projected = layer.output(attended)
        normed = add_rms_norm(stream.residual, projected, layer.post_attention_norm, epsilon)
        down = layer.down(silu_and_multiply(layer.gate_up(normed)))
        if index + 1 == len(self.weights.layers):
            stream.residual += down
        else:
            norm = self.weights.layers[index + 1].input_norm
            stream.normed = add_rms_norm(stream.residual, down, norm, epsilon)
