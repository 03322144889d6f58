"""Keys and values in eight bits: e4m3 numbers with one float32 scale for each token and head.

The format: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), section 3. A
row's largest number becomes 448, the largest of e4m3; so a number is off by at most 1/16 of
itself, and the smallest by 2**-10 of their row's scale.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
SCALE_BYTES = 4
LEAST = 1e-30
"""A row whose largest number is not over it is a row of zeros."""


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits uint8 [..., head_dim] and scales float32 [...] of rows [..., head_dim].

    What is not finite makes the whole row so.
    """
    rows = rows.float()
    largest = rows.abs().amax(dim=-1)
    # Of less than that nothing is left; its inverse might not be finite.
    inverse = torch.where(largest > LEAST, LARGEST / largest, 0.0)
    numbers = (rows * inverse[..., None]).to(torch.float8_e4m3fn)
    return numbers.view(torch.uint8), largest / LARGEST


def dequantize(bits: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., head_dim] of what `quantize` gave."""
    precise = torch.promote_types(dtype, torch.float32)
    numbers = bits.view(torch.float8_e4m3fn).to(precise)
    return (numbers * scales[..., None].to(precise)).to(dtype)
