"""The gate of the MLP: SiLU of one half times the other. Shazeer (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def silu_and_multiply_kernel(output_ptr, gate_up_ptr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """One tile of one row of [T, 2 * SIZE]. Grid: rows, tiles."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = columns < SIZE
    gate_ptr = gate_up_ptr + row * (2 * SIZE) + columns
    gate = tl.load(gate_ptr, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=is_real, other=0.0).to(tl.float32)
    tl.store(output_ptr + row * SIZE + columns, gate * tl.sigmoid(gate) * up, mask=is_real)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, size], of a contiguous [T, 2 * size]: gate, then up."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    grid = (num_rows, triton.cdiv(size, _TILE))
    silu_and_multiply_kernel[grid](output, gate_up, SIZE=size, TILE=_TILE, num_warps=4)
    return output
