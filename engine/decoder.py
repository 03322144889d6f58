"""The decoder of the Llama family: Llama, Mistral, Qwen2 and Qwen3 in one file.

    embed -> layers x [norm, attention, add; norm, gated MLP, add] -> norm -> logits

Tokens of all sequences of a step lie in one row, T in all; there is no batch dimension and
no padding. Llama: Touvron et al. (arXiv 2302.13971), section 2.2; RMSNorm: Zhang and
Sennrich (arXiv 1910.07467); gated MLP: Shazeer (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from engine.attention import StepAttention
from engine.linear import Linear
from engine.model_config import ModelConfig
from engine.ops import Angles, DecoderOps, HeadLayout, TorchOps
from engine.rope import Rope

LayerHook = Callable[[int], None]
"""Called with the number of layers whose KV of this step stands in the cache."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors; projections that read the same input are one matrix."""

    input_norm: torch.Tensor
    qkv: Linear
    """Rows: queries of all heads, then keys, then values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    """Rows: gate, then up."""
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a model, of one dtype, on one device."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear
    """Its weight is the embedding itself where the model ties them."""


class Decoder:
    """A model ready to run. Holds no state between steps; the KV cache does."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: DecoderOps | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops or TorchOps()
        self._eps = config.rms_norm_eps
        self._layout = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        self._rope = Rope(config.rope, weights.embedding.device)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] before the final norm, for int64 [T] inputs."""
        hidden = embedding(input_ids, self.weights.embedding)
        angles = self._ops.angles(self._rope, positions, hidden.dtype)
        update: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            normed = self._ops.add_norm(hidden, update, layer.input_norm, self._eps)
            update = self._attention(index, layer, normed, angles, attention)
            if after_layer is not None:
                after_layer(index + 1)
            normed = self._ops.add_norm(hidden, update, layer.post_attention_norm, self._eps)
            update = layer.down(self._ops.gate(layer.gate_up(normed)))
        return hidden if update is None else hidden + update

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] of hidden states [rows, hidden_size]."""
        normed = self._ops.add_norm(hidden, None, self.weights.final_norm, self._eps)
        return self.weights.lm_head(normed)

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderOps."""
        return self._ops.largest(logits)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        angles: Angles,
        attention: StepAttention,
    ) -> torch.Tensor:
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm)
        qkv = layer.qkv(normed)
        query, key_value = self._ops.rotate(qkv, self._layout, angles, norms, self._eps)
        window = self.config.windows[index]
        return layer.output(attention.attend(index, query, key_value, window))
