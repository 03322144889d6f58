"""Matrices for the compiled kernels: packed into panels, one copy for steps of any size."""

from __future__ import annotations

import torch

from engine.linear import Linear
from engine.native.library import Library

_PANEL = 64


class NativePacker:
    """Replaces a matrix's weight by panels (see linear.cpp).

    They beat oneDNN's order for few rows and match it for many, where the CPU has no matrix
    unit (AMX), which only oneDNN uses.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, matrix: Linear) -> None:
        """Matrices with an odd number of inputs stay as they are."""
        weight, bias = matrix.weight, matrix.bias
        assert weight is not None and weight.is_contiguous()
        num_outputs, num_inputs = weight.shape
        if num_inputs % 2:
            return
        num_panels = -(-num_outputs // _PANEL)
        packed = weight.new_empty(num_panels * _PANEL * num_inputs)
        self._library.pack(
            weight.data_ptr(),
            packed.data_ptr(),
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
        run, address = self._library.linear, packed.data_ptr()
        bias_address = None if bias is None else bias.data_ptr()

        def multiply(x: torch.Tensor) -> torch.Tensor:
            num_rows = x.shape[0]
            output = packed.new_empty((num_rows, num_outputs))
            x = x.contiguous()
            run(
                x.data_ptr(),
                address,
                bias_address,
                output.data_ptr(),
                num_rows,
                num_inputs,
                num_outputs,
                torch.get_num_threads(),
            )
            return output

        matrix.replace(multiply)
