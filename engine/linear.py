"""A matrix that multiplies rows: as loaded, or packed once in the order that a CPU reads it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

_PACKABLE = (torch.float32, torch.bfloat16)

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""Rows [T, in] to rows [T, out]."""


class Linear:
    """A weight [out, in], and a bias [out] where the model has one.

    The weight is None before it is loaded, and once something has taken its place. One that is
    shared (an embedding that is looked up, too) stays as it was loaded.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.is_shared = is_shared
        self.weight = weight
        self.bias = bias
        self.multiply: Multiply | None = None
        """What does it in the weight's place; None: PyTorch, with the weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.multiply is not None:
            return self.multiply(x)
        assert self.weight is not None, "the weight is not loaded"
        return linear(x, self.weight, self.bias)

    def replace(self, multiply: Multiply) -> None:
        """From now on `multiply` does it, which knows the bias; the weight is let go."""
        self.multiply = multiply
        if not self.is_shared:
            self.weight = None


def pack(matrix: Linear) -> None:
    """Puts the weight in oneDNN's own order, which then need not be made in every step.

    A shared one would be there twice, and stays as it is.

    One copy serves steps of any size. The functions are PyTorch's own, but private:
    `packing_error` tells whether they do here what they should.
    """
    if matrix.is_shared:
        return
    bias = matrix.bias
    multiply = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix.weight)
    matrix.replace(lambda x: multiply(x, packed, bias, "none", [], ""))


def packing_error(dtype: torch.dtype) -> str | None:
    """Why matrices of `dtype` cannot be packed on this machine, or None."""
    if dtype not in _PACKABLE:
        return f"dtype {dtype}"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        matrix = Linear(weight, bias)
        pack(matrix)
        for num_rows in (1, 5):
            x = torch.randn(num_rows, 32, generator=generator).to(dtype)
            torch.testing.assert_close(matrix(x), linear(x, weight, bias), rtol=0.02, atol=0.05)
    except (AttributeError, RuntimeError, AssertionError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None
