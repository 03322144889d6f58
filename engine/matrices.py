"""How a model's matrices are kept: as loaded, packed, or quantized. Chosen once, for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.linear import Linear
from engine.quantization.schemes import quantize
from engine.quantization.weight import Code, QuantizedWeight, stack


class QuantizedKernels(Protocol):
    """Multiplies with matrices in codes."""

    def serves(self, weight: QuantizedWeight) -> bool:
        """Whether it can multiply with `weight`."""

    def __call__(self, matrix: Linear, weight: QuantizedWeight) -> None:
        """From now on `matrix` is `weight`, with the bias that it has."""


@dataclass(frozen=True)
class Part:
    """Some outputs of a matrix: floating [out, in] or in codes, and their bias."""

    content: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None


@dataclass(frozen=True)
class MatrixStorage:
    """What becomes of a matrix that has been loaded."""

    dtype: torch.dtype
    """Of the rows that it multiplies."""
    pack: Callable[[Linear], None] | None = None
    """Puts a floating one in the order in which the kernels read it."""
    kernels: QuantizedKernels | None = None
    """For those in codes; None, or those that it does not serve: they are written out."""
    scheme: Code | None = None
    """Codes for matrices that a checkpoint has as floating ones; None: they stay that."""

    def keep(self, matrix: Linear) -> None:
        """Takes a floating matrix whose weight and bias are filled."""
        if self.pack is not None:
            self.pack(matrix)

    def quantize(self, matrix: Linear) -> None:
        """The same for a matrix of a layer, which `scheme` may quantize."""
        if self.scheme is None or matrix.weight is None:
            self.keep(matrix)
        else:
            self.keep_quantized(matrix, quantize(matrix.weight, self.scheme))

    def keep_quantized(self, matrix: Linear, weight: QuantizedWeight) -> None:
        """Takes a matrix in codes; only its bias is filled."""
        if self.kernels is not None and self.kernels.serves(weight):
            self.kernels(matrix, weight)
        else:
            matrix.weight = weight.dequantize(self.dtype)
            self.keep(matrix)

    def keep_parts(self, matrix: Linear, parts: Sequence[Part]) -> None:
        """Takes a matrix whose outputs come in parts, some or all of them in codes."""
        quantized = [part.content for part in parts if isinstance(part.content, QuantizedWeight)]
        whole = stack(quantized) if len(quantized) == len(parts) else None
        if whole is not None:
            self.keep_quantized(matrix, whole)
        else:
            each = [self._kept(part) for part in parts]
            matrix.replace(lambda x: torch.cat([own(x) for own in each], dim=-1))

    def _kept(self, part: Part) -> Linear:
        own = Linear(bias=part.bias)
        if isinstance(part.content, QuantizedWeight):
            self.keep_quantized(own, part.content)
        else:
            own.weight = part.content
            self.keep(own)
        return own
