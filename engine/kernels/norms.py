"""RMSNorm, with the addition to the residual stream that comes before it.

RMSNorm: Zhang and Sennrich (arXiv 1910.07467).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    output_ptr,
    residual_ptr,
    added_ptr,
    weight_ptr,
    epsilon,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row. With ADDS, residual += added, rounded to its dtype, comes first."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, TILE)
    is_real = columns < SIZE
    x = tl.load(residual_ptr + row + columns, mask=is_real, other=0.0)
    if ADDS:
        added = tl.load(added_ptr + row + columns, mask=is_real, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + columns, x, mask=is_real)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_real, other=0.0).to(tl.float32)
    tl.store(output_ptr + row + columns, x * scale * weight, mask=is_real)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of each row of a contiguous [T, size]."""
    return _launch(x, None, weight, epsilon)


def add_rms_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Adds `added` to `residual` in place and returns the norm of the sum; both [T, size]."""
    return _launch(residual, added, weight, epsilon)


def _launch(
    residual: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    num_rows, size = residual.shape
    output = torch.empty_like(residual)
    tile = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        output,
        residual,
        residual if added is None else added,
        weight,
        epsilon,
        SIZE=size,
        ADDS=added is not None,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
    )
    return output
