"""Matrices in codes for the compiled kernels: in panels, multiplied without being written out."""

from __future__ import annotations

import ctypes

import torch

from engine.linear import Linear
from engine.native.library import Library, QuantizedProduct
from engine.quantization.weight import INT4_OFFSET, Code, QuantizedWeight

_PANEL = 64
_RUN = 32
"""Codes of INT4 that lie in 16 bytes."""


class NativeQuantizer:
    """Gives a matrix the product with a quantized weight; see quantized.cpp."""

    def __init__(self, library: Library) -> None:
        assert library.packs, "this CPU does not multiply the element type as it lies in panels"
        self._library = library

    def serves(self, weight: QuantizedWeight) -> bool:
        """Pairs of inputs stay together, so a group has an even number of them."""
        return weight.num_inputs % 2 == 0 and weight.group_size % 2 == 0

    def __call__(self, matrix: Linear, weight: QuantizedWeight) -> None:
        matrix.replace(_Product(self._library, weight, matrix.bias))


class _Product:
    """Rows times one matrix. Owns what the kernel finds by address."""

    def __init__(
        self, library: Library, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> None:
        self._run = library.quantized[weight.code.value]
        self._order = weight.order
        self._num_outputs = weight.num_outputs
        self._bias = bias
        self._codes = _in_panels(weight, library.per_word)
        self._scales = _groups_in_panels(weight.scales.float())
        self._zeros = None if weight.zeros is None else _groups_in_panels(weight.zeros)
        if weight.code is Code.INT4:
            offset = torch.full_like(self._scales, INT4_OFFSET, dtype=torch.int8)
            self._zeros = offset if self._zeros is None else self._zeros + offset
        self._arguments = QuantizedProduct(
            codes=self._codes.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=None if self._zeros is None else self._zeros.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=weight.num_inputs,
            outputs=weight.num_outputs,
            group_size=min(weight.group_size, weight.num_inputs),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if self._order is None else x[:, self._order]
        output = x.new_empty((x.shape[0], self._num_outputs))
        arguments = self._arguments
        arguments.rows, arguments.output = x.data_ptr(), output.data_ptr()
        arguments.num_rows = x.shape[0]
        self._run(ctypes.byref(arguments), torch.get_num_threads())
        return output


def _in_panels(weight: QuantizedWeight, per_word: int) -> torch.Tensor:
    """uint8 codes as [outputs / 64, inputs / per_word, 64 * per_word], rows of zeros at the end."""
    if weight.code is Code.INT4:
        codes = (weight.integers() + INT4_OFFSET).view(torch.uint8)
    else:
        codes = weight.codes.view(torch.uint8)
    # Codes of a word are moved as one integer.
    words = _padded(codes).view(torch.uint8 if per_word == 1 else torch.int16)
    panels = words.view(-1, _PANEL, words.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    if weight.code is not Code.INT4:
        return panels
    runs = panels.view(-1, 2, _RUN // 2)
    return runs[:, 0] | (runs[:, 1] << 4)


def _groups_in_panels(groups: torch.Tensor) -> torch.Tensor:
    """[outputs, groups] as [outputs / 64, groups, 64]."""
    return _padded(groups).view(-1, _PANEL, groups.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: torch.Tensor) -> torch.Tensor:
    num_missing = -len(rows) % _PANEL
    if num_missing == 0:
        return rows
    return torch.cat([rows, rows.new_zeros(num_missing, rows.shape[1])])
