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
from torch.nn.functional import embedding, linear, rms_norm, silu

from engine.attention import StepAttention
from engine.model_config import ModelConfig
from engine.rope import Rope, rotate

LayerHook = Callable[[int], None]
"""Called with the number of layers whose KV of this step stands in the cache."""


@dataclass(frozen=True)
class Linear:
    """A weight [out, in], and a bias [out] where the model has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


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
    lm_head: torch.Tensor
    """The embedding itself where the model ties them."""


class Decoder:
    """A model ready to run. Holds no state between steps; the KV cache does."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
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
        angles = self._rope.angles(positions, hidden.dtype)
        for index, layer in enumerate(self.weights.layers):
            hidden = hidden + self._attention(index, layer, hidden, angles, attention)
            if after_layer is not None:
                after_layer(index + 1)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab_size] of hidden states [rows, hidden_size]."""
        return linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        # Keys go back in their place, so that they lie beside the values.
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(heads[:, : num_heads + num_kv_heads], *angles)
            query = rotated[:, :num_heads]
            heads[:, num_heads : num_heads + num_kv_heads] = rotated[:, num_heads:]
        else:
            query = rotate(self._norm(heads[:, :num_heads], layer.q_norm), *angles)
            keys = self._norm(heads[:, num_heads : num_heads + num_kv_heads], layer.k_norm)
            heads[:, num_heads : num_heads + num_kv_heads] = rotate(keys, *angles)
        key_value = heads[:, num_heads:].view(-1, 2, num_kv_heads, config.head_dim)
        return layer.output(attention.attend(index, query, key_value, config.windows[index]))

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.post_attention_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32 inside whatever the dtype of `x`."""
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)
