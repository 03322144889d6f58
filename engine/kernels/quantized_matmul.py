"""Products with a matrix in codes, which turn into numbers in registers, on their way from memory.

One kernel for int8, fp8 and int4. Codes less their zero are exact in every element type, so a
tile of them is multiplied as it is, and the scale meets the sums of its group in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.tiles import MIN_DOT
from engine.quantization.weight import Code, QuantizedWeight


@triton.jit
def quantized_matmul_kernel(
    output_ptr,
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One tile of the output. TILE_K divides GROUP_SIZE unless there is one group.

    CODE: "int8", "int4", "fp8" (which the device converts) or "fp8 bits" (the kernel does).
    Grid: tiles of rows, tiles of outputs.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    is_row, is_column = rows < num_rows, columns < NUM_OUTPUTS
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP_SIZE - 1) // GROUP_SIZE
    IS_PACKED: tl.constexpr = CODE == "int4"
    STORED_K: tl.constexpr = TILE_K // 2 if IS_PACKED else TILE_K
    ROW_BYTES: tl.constexpr = NUM_INPUTS // 2 if IS_PACKED else NUM_INPUTS
    inner, stored = tl.arange(0, TILE_K), tl.arange(0, STORED_K)
    x_ptr += rows[:, None] * NUM_INPUTS + inner[None, :]
    codes_ptr += columns[:, None] * ROW_BYTES + stored[None, :]
    scales_ptr += columns * NUM_GROUPS
    zeros_ptr += columns * NUM_GROUPS
    totals = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, NUM_INPUTS, TILE_K):
        left = NUM_INPUTS - start
        x = tl.load(x_ptr + start, mask=is_row[:, None] & (inner < left)[None, :], other=0.0)
        offset = start // 2 if IS_PACKED else start
        is_stored = stored < ROW_BYTES - offset
        is_code = is_column[:, None] & is_stored[None, :]
        codes = tl.load(codes_ptr + offset, mask=is_code, other=0)
        group = start // GROUP_SIZE
        if CODE == "int8":
            integers = codes.to(tl.int16)
        elif CODE == "int4":
            integers = tl.interleave(codes & 15, codes >> 4).to(tl.int16) - 8
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + group, mask=is_column, other=0)
            integers -= zeros.to(tl.int16)[:, None]
        if CODE == "fp8":
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(x.dtype)
        elif CODE == "fp8 bits":
            values = fp8_of_bits(codes).to(x.dtype)
        else:
            values = integers.to(x.dtype)
        if NUM_GROUPS == 1:
            totals = tl.dot(x, tl.trans(values), totals, input_precision="tf32x3")
        else:
            sums = tl.dot(x, tl.trans(values), input_precision="tf32x3")
            scales = tl.load(scales_ptr + group, mask=is_column, other=0.0)
            totals += sums * scales.to(tl.float32)[None, :]
    if NUM_GROUPS == 1:
        totals *= tl.load(scales_ptr, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        totals += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    output_ptr += rows[:, None] * NUM_OUTPUTS + columns[None, :]
    tl.store(output_ptr, totals, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def fp8_of_bits(codes):
    """float16 of float8_e4m3fn in bytes, for devices without the type; not of its NaN.

    Exponent and mantissa in float16's places make 2^-8 of the number, its subnormals included.
    """
    codes = codes.to(tl.int16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@dataclass(frozen=True)
class _Tiles:
    """Extents of a tile, and how many warps and stages compute one."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _tiles_for(num_rows: int, dtype: torch.dtype) -> _Tiles:
    """Few rows wait for memory: narrow tiles, so that all processors read. Many are bound by
    arithmetic: square ones. float32 takes three products, and the registers for them."""
    if num_rows <= MIN_DOT:
        return _Tiles(MIN_DOT, 32, 128, 4, 4)
    if dtype == torch.float32:
        return _Tiles(32, 32, 32, 4, 2)
    if num_rows <= 64:
        return _Tiles(64, 64, 64, 4, 4)
    return _Tiles(128, 128, 64, 8, 3)


def serves(weight: QuantizedWeight) -> bool:
    """Whether groups are whole tiles."""
    return weight.scales.shape[1] == 1 or weight.group_size % MIN_DOT == 0


def quantized_matmul(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, *, has_fp8: bool
) -> torch.Tensor:
    """Rows [T, out] of a contiguous [T, in], whose columns are in the weight's order.

    `has_fp8`: whether the device converts float8_e4m3fn (from compute capability 8.9 on).
    """
    num_rows, num_outputs = len(x), weight.num_outputs
    output = x.new_empty(num_rows, num_outputs)
    tiles = _tiles_for(num_rows, x.dtype)
    tile_k = tiles.inputs
    if weight.scales.shape[1] > 1:
        while weight.group_size % tile_k:
            tile_k //= 2
    name, codes = weight.code.value, weight.codes
    if weight.code is Code.FP8:
        name, codes = "fp8" if has_fp8 else "fp8 bits", codes.view(torch.uint8)
    grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs))
    quantized_matmul_kernel[grid](
        output,
        x,
        codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        num_rows,
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=weight.num_inputs,
        GROUP_SIZE=min(weight.group_size, weight.num_inputs),
        CODE=name,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        TILE_M=tiles.rows,
        TILE_N=tiles.outputs,
        TILE_K=tile_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return output
