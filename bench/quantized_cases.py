"""Cases for products with matrices in codes; see bench.kernel_cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.kernel_cases import Errors, random
from engine.kernels.quantized_matmul import quantized_matmul
from engine.quantization.schemes import quantize
from engine.quantization.weight import Code, QuantizedWeight, pack_int4


@dataclass(frozen=True)
class QuantizedCase:
    """One product, with a bias. `group_size` 0: a scale for each output, without zero points."""

    code: Code
    num_rows: int = 5
    num_inputs: int = 160
    num_outputs: int = 72
    group_size: int = 0
    dtype: torch.dtype = torch.float32
    has_fp8: bool = False

    def run(self, device: torch.device) -> Errors:
        """Eager reference: the product with the weight that the codes stand for."""
        weight = self.weight()
        x = random(3, self.num_rows, self.num_inputs).to(self.dtype)
        bias = random(4, self.num_outputs).to(self.dtype)
        got = quantized_matmul(
            x.to(device), weight.to(device), bias.to(device), has_fp8=self.has_fp8
        )
        return Errors.of(
            got,
            x @ weight.dequantize(self.dtype).T + bias,
            x.double() @ weight.dequantize(torch.float64).T + bias.double(),
        )

    def weight(self) -> QuantizedWeight:
        """Of numbers that keep the rows' length."""
        values = random(1, self.num_outputs, self.num_inputs) * self.num_inputs**-0.5
        if self.group_size == 0 and self.code is not Code.INT4:
            return quantize(values, self.code)
        shape = (self.num_outputs, -(-self.num_inputs // (self.group_size or self.num_inputs)))
        scales = (0.02 * (1 + random(2, *shape).abs())).half()
        if self.code is Code.FP8:
            codes, zeros = values.to(torch.float8_e4m3fn), None
        else:
            largest = 7 if self.code is Code.INT4 else 127
            codes = (random(1, *values.shape) * largest / 3).round().clamp(-largest, largest)
            codes = codes.to(torch.int8)
            zeros = (random(5, *shape) * 2).round().to(torch.int8)
            if self.code is Code.INT4:
                codes = pack_int4(codes)
        group_size = self.group_size or self.num_inputs
        return QuantizedWeight(self.code, codes, scales, zeros, group_size)


def quantized_sweep(has_fp8: bool) -> list[QuantizedCase]:
    """Every kind of codes in every dtype, for few, some and many rows."""
    kinds = ((Code.INT8, 0), (Code.FP8, 0), (Code.FP8, 128), (Code.INT4, 128))
    return [
        QuantizedCase(code, num_rows, 4096, 1024, group_size, dtype, has_fp8)
        for code, group_size in kinds
        for num_rows in (1, 40, 300)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
