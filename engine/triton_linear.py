"""Matrices in codes on a GPU; see engine.kernels.quantized_matmul."""

from __future__ import annotations

import torch

from engine.kernels.quantized_matmul import quantized_matmul, serves
from engine.linear import Linear
from engine.quantization.weight import QuantizedWeight

_FP8_CAPABILITY = (8, 9)


class TritonQuantizer:
    """Gives a matrix the product with a quantized weight."""

    def __init__(self, has_fp8: bool) -> None:
        self.has_fp8 = has_fp8

    @classmethod
    def on(cls, device: torch.device) -> TritonQuantizer:
        """For a CUDA device."""
        return cls(torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY)

    def serves(self, weight: QuantizedWeight) -> bool:
        """Groups have a multiple of 16 inputs, or there is one."""
        return serves(weight)

    def __call__(self, matrix: Linear, weight: QuantizedWeight) -> None:
        bias, order = matrix.bias, weight.order

        def multiply(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous() if order is None else x[:, order]
            return quantized_matmul(x, weight, bias, has_fp8=self.has_fp8)

        matrix.replace(multiply)
