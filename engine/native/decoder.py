"""A decoder whose layers are one call each of the compiled kernels."""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import embedding

from engine.attention import StepAttention
from engine.attention.native import NativeStep
from engine.decoder import Decoder, DecoderWeights, LayerHook
from engine.decoder import LayerWeights as LayerTensors
from engine.linear import Linear
from engine.model_config import ModelConfig
from engine.native.library import NO_WINDOW, LayerWeights, Library, Rows
from engine.native.linear import PackedMatrix
from engine.native.ops import NativeOps


class NativeDecoder(Decoder):
    """Computes what `Decoder` does with the same kernels, to the bit.

    A step then starts one team of threads a layer, not one for each of its nine operations,
    and its tensors are made once. Needs matrices that `is_packed`; steps whose attention
    another backend plans go the longer way.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, library: Library) -> None:
        super().__init__(config, weights, NativeOps(library))
        self._library = library
        self._layers = [_fields(layer) for layer in weights.layers]
        self._addresses = [ctypes.addressof(layer) for layer in self._layers]
        self._windows = [NO_WINDOW if window is None else window for window in config.windows]
        query_size, kv_size = config.q_size, config.kv_size
        self._narrow = max(config.hidden_size, query_size, config.intermediate_size)
        self._wide = max(query_size + 2 * kv_size, 2 * config.intermediate_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """See Decoder."""
        if not isinstance(attention, NativeStep):
            return super().forward(input_ids, positions, attention, after_layer)
        assert attention.num_tokens == len(input_ids)
        attention.set_num_heads(self.config.num_heads)
        hidden = embedding(input_ids, self.weights.embedding)
        update = torch.empty_like(hidden)
        cos, sin = self._rope.cos_sin(positions)
        sizes = (self._narrow, self._narrow, self._wide)
        scratch = [hidden.new_empty(len(hidden) * size) for size in sizes]
        tensors = (hidden, update, *scratch, cos, sin)
        rows = Rows(*(tensor.data_ptr() for tensor in tensors), self._eps)
        address = ctypes.addressof(rows)
        for index, weights in enumerate(self._addresses):
            self._library.layer(attention.address, weights, address, index, self._windows[index])
            if after_layer is not None:
                after_layer(index + 1)
        hidden += update
        return hidden


def is_packed(weights: DecoderWeights) -> bool:
    """Whether every layer's matrices lie in panels."""
    return all(
        isinstance(matrix.multiply, PackedMatrix)
        for layer in weights.layers
        for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )


def _fields(layer: LayerTensors) -> LayerWeights:
    """The layer as the kernels know it; its tensors must stay alive."""

    def address(norm: torch.Tensor | None) -> int | None:
        return None if norm is None else norm.data_ptr()

    def matrix(linear: Linear) -> object:
        assert isinstance(linear.multiply, PackedMatrix)
        return linear.multiply.fields

    return LayerWeights(
        input_norm=address(layer.input_norm),
        post_attention_norm=address(layer.post_attention_norm),
        query_norm=address(layer.q_norm),
        key_norm=address(layer.k_norm),
        qkv=matrix(layer.qkv),
        output=matrix(layer.output),
        gate_up=matrix(layer.gate_up),
        down=matrix(layer.down),
    )
