"""The compiled operations between matrices, and the matrices, against PyTorch's."""

from __future__ import annotations

import pytest
import torch

from engine.linear import Linear, pack, packing_error
from engine.native.linear import NativePacker
from engine.native.ops import NativeOps
from engine.ops import HeadLayout, TorchOps
from engine.rope import Rope, RopeConfig
from tests.engine.kernels import native_library

EPS = 1e-5
TOLERANCES = [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
"""bfloat16: two roundings, each of 2^-8 of a number of about 2."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packer(dtype: torch.dtype) -> NativePacker:
    library = native_library(dtype)
    if not library.packs:
        pytest.skip(f"this CPU has no instructions for {dtype}")
    return NativePacker(library, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("size", [8, 64, 100])
def test_add_norm_equals_pytorch(size: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, update = draw(5, size, dtype=dtype), draw(5, size, dtype=dtype, seed=1)
    weight, expected_hidden = draw(size, dtype=dtype, seed=2), hidden.clone()
    normed = NativeOps(native_library(dtype)).add_norm(hidden, update, weight, EPS)
    expected = TorchOps().add_norm(expected_hidden, update, weight, EPS)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(hidden, expected_hidden)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_rotation_equals_pytorch(
    head_dim: int, has_norms: bool, dtype: torch.dtype, tolerance: float
) -> None:
    layout = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    rope = Rope(RopeConfig(head_dim, theta=1000.0), torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 400])
    qkv = draw(4, 8 * head_dim, dtype=dtype)
    norms = None
    if has_norms:
        norms = (draw(head_dim, dtype=dtype, seed=1), draw(head_dim, dtype=dtype, seed=2))
    results = [
        ops.rotate(qkv.clone(), layout, ops.angles(rope, positions, dtype), norms, EPS)
        for ops in (NativeOps(native_library(dtype)), TorchOps())
    ]
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("size", [8, 64, 100])
def test_the_gate_equals_pytorch(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = draw(5, 2 * size, dtype=dtype) * 4
    gate_up[0, :6] = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0, 1e-30])
    own = NativeOps(native_library(dtype)).gate(gate_up)
    torch.testing.assert_close(own, TorchOps().gate(gate_up), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_stays_none(dtype: torch.dtype) -> None:
    ops = NativeOps(native_library(dtype))
    row = draw(1, 64, dtype=dtype)
    row[0, 3] = float("nan")
    assert ops.add_norm(row, None, torch.ones(64, dtype=dtype), EPS).isnan().all()
    assert ops.gate(row)[0, 3].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 64, 2500])
def test_the_largest_of_a_row_is_the_first_of_equal_ones(size: int, dtype: torch.dtype) -> None:
    rows = draw(4, size, dtype=dtype)
    rows[0, 2] = rows[0, -1] = 9.0
    rows[1, -1] = 9.0
    rows[2] = float("-inf")
    rows[3, 1], rows[3, 3] = float("inf"), float("nan")
    values, indices = NativeOps(native_library(dtype)).largest(rows)
    assert values[:3].tolist() == [9.0, 9.0, float("-inf")]
    assert values[3].isnan()
    assert indices[:3].tolist() == [2, size - 1, 0]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 32), (100, 34), (200, 192)])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 7, 9, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_matrix_in_panels_equals_the_plain_one(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weight = draw(num_outputs, num_inputs, dtype=dtype) * num_inputs**-0.5
    bias = draw(num_outputs, dtype=dtype, seed=1) if has_bias else None
    x = draw(num_rows, num_inputs, dtype=dtype, seed=2)
    matrix = Linear(weight, bias)
    expected = matrix(x)
    packer(dtype)(matrix)
    assert matrix.weight is None
    torch.testing.assert_close(matrix(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("num_rows", [1, 8, 9])
@pytest.mark.parametrize("num_inputs", [32, 34, 48])
def test_a_shared_matrix_stays_and_equals_the_plain_one(
    num_inputs: int, num_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    weight = draw(100, num_inputs, dtype=dtype) * num_inputs**-0.5
    matrix, x = Linear(weight, is_shared=True), draw(num_rows, num_inputs, dtype=dtype, seed=2)
    expected = matrix(x)
    packer(dtype)(matrix)
    assert matrix.weight is weight
    torch.testing.assert_close(matrix(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_packed_by_onednn_equals_the_plain_one(dtype: torch.dtype) -> None:
    if reason := packing_error(dtype):
        pytest.skip(reason)
    matrix = Linear(draw(48, 32, dtype=dtype), draw(48, dtype=dtype, seed=1))
    x = draw(3, 32, dtype=dtype, seed=2)
    expected = matrix(x)
    pack(matrix)
    assert matrix.weight is None
    torch.testing.assert_close(matrix(x), expected, rtol=2e-2, atol=4e-2)


def test_half_precision_is_not_packed() -> None:
    assert packing_error(torch.float16) == "dtype torch.float16"
