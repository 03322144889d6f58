"""Weight-only quantization at load: int8 and fp8 with a scale for each output, no zero points.

A row's largest weight takes the largest code; all others are rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.errors import StartupError
from engine.quantization.weight import Code, QuantizedWeight

SCHEMES: Mapping[str, Code] = {"int8": Code.INT8, "fp8": Code.FP8}
"""What `--quantization` may name besides "none"."""
_INT8_MAX = 127
_ROWS_AT_ONCE = 1024
"""Bounds the memory of intermediate results."""


def scheme_of(name: str) -> Code | None:
    """The codes of the scheme `name`; None of "none". Raises StartupError."""
    if name == "none":
        return None
    if name not in SCHEMES:
        supported = ", ".join(("none", *SCHEMES))
        raise StartupError(f"quantization {name} is not supported; supported: {supported}")
    return SCHEMES[name]


def quantize(weight: torch.Tensor, code: Code) -> QuantizedWeight:
    """`weight` [out, in] in codes of INT8 or FP8, with a float32 scale for each output."""
    dtype = torch.int8 if code is Code.INT8 else torch.float8_e4m3fn
    largest = _INT8_MAX if code is Code.INT8 else torch.finfo(dtype).max
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(len(weight), 1, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        values = weight[rows].float()
        scale = values.abs().amax(1, keepdim=True) / largest
        # A row of zeros has any scale but 0.
        scale[scale == 0] = 1
        scales[rows] = scale
        values = values / scale
        codes[rows] = (values.round_() if code is Code.INT8 else values).to(dtype)
    return QuantizedWeight(code, codes, scales, None, weight.shape[1])
