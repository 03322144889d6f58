"""Matrices in codes for the compiled kernels: in panels, multiplied without being written out."""

from __future__ import annotations

import ctypes

import torch

from engine.linear import Linear
from engine.native.library import Library, QuantizedProduct
from engine.quantization.weight import INT4_OFFSET, Code, QuantizedWeight

_PANEL = 64
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_RUN = 32
_INTEGERS_PER_WORD = 4
_INTEGERS_RUN = 128
"""Codes of INT4 of which the first half lies in the low halves of bytes, the others in the high."""


class NativeQuantizer:
    """Gives a matrix the product with a quantized weight.

    Where the CPU multiplies bytes (AVX512-VNNI), bfloat16 rows meet int8 and int4 as integers
    (integers.cpp); codes turn into numbers for all others (quantized.cpp).
    """

    def __init__(self, library: Library) -> None:
        assert library.packs, "this CPU does not multiply the element type as it lies in panels"
        self._library = library

    def serves(self, weight: QuantizedWeight) -> bool:
        """Pairs of inputs stay together, so a group has an even number of them."""
        return weight.num_inputs % 2 == 0 and weight.group_size % 2 == 0

    def __call__(self, matrix: Linear, weight: QuantizedWeight) -> None:
        kind = _IntegerProduct if self._multiplies_integers(weight) else _Product
        matrix.replace(kind(self._library, weight, matrix.bias))

    def _multiplies_integers(self, weight: QuantizedWeight) -> bool:
        largest = self._library.max_integer_group
        if largest == 0 or weight.code is Code.FP8:
            return False
        inputs, group = weight.num_inputs, weight.group_size
        is_whole = group >= inputs or group <= largest or group % largest == 0
        return is_whole and inputs % _INTEGERS_PER_WORD == group % _INTEGERS_PER_WORD == 0


class _Product:
    """Rows times one matrix. Owns what the kernel finds by address."""

    def __init__(
        self, library: Library, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> None:
        self._library = library
        self._code = weight.code.value
        self._order = weight.order
        self._num_outputs = weight.num_outputs
        self._bias = bias
        self._codes = self._panels_of(weight)
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
        self._run(arguments)
        return output

    def _panels_of(self, weight: QuantizedWeight) -> torch.Tensor:
        return _in_panels(_unsigned(weight), weight.code, self._library.per_word, _RUN)

    def _run(self, arguments: QuantizedProduct) -> None:
        run = self._library.quantized[self._code]
        run(ctypes.byref(arguments), torch.get_num_threads())


class _IntegerProduct(_Product):
    """Of bfloat16 rows with int8 or int4."""

    def _panels_of(self, weight: QuantizedWeight) -> torch.Tensor:
        codes = _unsigned(weight)
        if weight.code is Code.INT8:
            codes = codes ^ 0x80  # adds 128
        return _in_panels(codes, weight.code, _INTEGERS_PER_WORD, _INTEGERS_RUN)

    def _run(self, arguments: QuantizedProduct) -> None:
        group = min(self._library.max_integer_group, arguments.group_size)
        num_groups = -(-arguments.inputs // group)
        size = arguments.num_rows * (2 * arguments.inputs + 8 * num_groups)
        integers = torch.empty(size, dtype=torch.int8)
        run = self._library.integers[self._code]
        run(ctypes.byref(arguments), integers.data_ptr(), torch.get_num_threads())


def _unsigned(weight: QuantizedWeight) -> torch.Tensor:
    """uint8 [out, in]: the codes as they are, INT4's from 0 to 15."""
    if weight.code is Code.INT4:
        return (weight.integers() + INT4_OFFSET).view(torch.uint8)
    return weight.codes.view(torch.uint8)


def _in_panels(codes: torch.Tensor, code: Code, per_word: int, run: int) -> torch.Tensor:
    """Codes [out, in] as [outputs / 64, inputs / per_word, 64, per_word], rows of zeros at the
    end; INT4's two to a byte, in runs."""
    # The codes of a word are moved as one integer.
    words = _padded(codes).view(_WORDS[per_word])
    panels = words.view(-1, _PANEL, words.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
    if code is not Code.INT4:
        return panels
    runs = panels.view(-1, 2, run // 2)
    return runs[:, 0] | (runs[:, 1] << 4)


def _groups_in_panels(groups: torch.Tensor) -> torch.Tensor:
    """[outputs, groups] as [outputs / 64, groups, 64]."""
    return _padded(groups).view(-1, _PANEL, groups.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: torch.Tensor) -> torch.Tensor:
    num_missing = -len(rows) % _PANEL
    if num_missing == 0:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(num_missing, rows.shape[1])])
