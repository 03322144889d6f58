"""Matrices for the compiled kernels: packed into panels, one copy for steps of any size."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from engine.linear import Linear
from engine.memory import Arena
from engine.native.library import Library, Matrix

_PANEL = 32
_LANES = 16
_MAX_ROWS_AS_LOADED = 8
"""Beyond, oneDNN is faster even though it reorders the weight each time."""


class PackedMatrix:
    """A matrix in panels, and what multiplies rows with it."""

    def __init__(
        self,
        library: Library,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: tuple[int, int],
    ) -> None:
        """`sizes`: numbers of outputs and of inputs."""
        self._library = library
        self._panels = panels
        self._bias = bias
        num_outputs, num_inputs = sizes
        self.fields = Matrix(
            panels=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=num_inputs,
            outputs=num_outputs,
        )
        """As the kernels know it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        output = self._panels.new_empty((num_rows, self.fields.outputs))
        x = x.contiguous()
        self._library.linear(
            x.data_ptr(),
            self.fields.panels,
            self.fields.bias,
            output.data_ptr(),
            num_rows,
            self.fields.inputs,
            self.fields.outputs,
            torch.get_num_threads(),
        )
        return output


class NativePacker:
    """Replaces a matrix's weight by panels (see linear.cpp).

    They beat oneDNN's order for few rows and match it for many, where the CPU has no matrix
    unit (AMX), which only oneDNN uses.
    """

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        assert library.packs, "this CPU does not multiply the element type as it lies in panels"
        self._library = library
        self._arena = Arena(dtype)

    def __call__(self, matrix: Linear) -> None:
        """Matrices whose number of inputs is odd stay as they are."""
        if matrix.is_shared:
            self._use_as_loaded(matrix)
        elif matrix.weight is not None and matrix.weight.shape[1] % 2 == 0:
            self._pack(matrix, matrix.weight)

    def _pack(self, matrix: Linear, weight: torch.Tensor) -> None:
        bias = matrix.bias
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // _PANEL)
        packed = self._arena.take(num_panels * _PANEL * num_inputs)
        self._library.pack(
            weight.data_ptr(),
            packed.data_ptr(),
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
        matrix.replace(PackedMatrix(self._library, packed, bias, (num_outputs, num_inputs)))

    def _use_as_loaded(self, matrix: Linear) -> None:
        weight = matrix.weight
        if weight is None or matrix.bias is not None or weight.shape[1] % _LANES:
            return
        num_outputs, num_inputs = weight.shape
        run, address = self._library.plain_linear, weight.data_ptr()

        def multiply(x: torch.Tensor) -> torch.Tensor:
            num_rows = x.shape[0]
            if num_rows > _MAX_ROWS_AS_LOADED:
                return linear(x, weight)
            output = weight.new_empty((num_rows, num_outputs))
            x = x.contiguous()
            threads = torch.get_num_threads()
            run(
                x.data_ptr(), address, output.data_ptr(), num_rows, num_inputs, num_outputs, threads
            )
            return output

        matrix.replace(multiply)
