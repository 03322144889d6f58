"""Matrices in codes: how far they are from what they stand for, and products with them."""

from __future__ import annotations

import copy

import pytest
import torch

from core.errors import StartupError
from engine.linear import Linear
from engine.matrices import MatrixStorage
from engine.native.quantized import NativeQuantizer
from engine.quantization.schemes import quantize, scheme_of
from engine.quantization.weight import Code, QuantizedWeight, pack_int4, stack, unpack_int4
from tests.engine.kernels import native_library


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_int4(num_outputs: int, num_inputs: int, group_size: int) -> QuantizedWeight:
    """With zero points, and columns in another order than the inputs."""
    generator = torch.Generator().manual_seed(num_outputs)
    num_groups = -(-num_inputs // group_size)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)

    scales = torch.rand(num_outputs, num_groups, generator=generator).half()
    zeros = integers(num_outputs, num_groups)
    order = torch.randperm(num_inputs, generator=generator)
    codes = pack_int4(integers(num_outputs, num_inputs))
    return QuantizedWeight(Code.INT4, codes, scales, zeros, group_size, order)


def drawn(kind: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    if kind == "int4":
        return drawn_int4(num_outputs, num_inputs, 24)
    weight = quantize(draw(num_outputs, num_inputs), Code(kind.split()[0]))
    if kind != "int8 with zeros":
        return weight
    zeros = torch.arange(num_outputs, dtype=torch.uint8).view(-1, 1).view(torch.int8)
    return QuantizedWeight(weight.code, weight.codes, weight.scales, zeros, num_inputs)


def test_int8_rounds_to_the_nearest_of_255_steps_and_leaves_the_weight_alone() -> None:
    weight = draw(1100, 48)
    before = weight.clone()
    quantized = quantize(weight, Code.INT8)
    error = (quantized.dequantize(torch.float32) - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) / 254 * 1.0001).all())
    assert torch.equal(weight, before)


def test_fp8_keeps_three_bits_behind_the_first() -> None:
    weight = draw(1100, 48)
    error = (quantize(weight, Code.FP8).dequantize(torch.float32) - weight).abs()
    # Below 2^-6 of the code's unit, steps are 2^-9.
    least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert bool((error <= torch.maximum(weight.abs() / 16, least) * 1.0001).all())


@pytest.mark.parametrize("code", [Code.INT8, Code.FP8])
def test_a_row_of_zeros_stays_one(code: Code) -> None:
    assert quantize(torch.zeros(2, 4), code).dequantize(torch.float32).tolist() == [[0.0] * 4] * 2


def test_int4_keeps_its_inputs_in_order() -> None:
    codes = torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0xF0, 0x78]]
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)


def test_zeros_groups_and_order_are_undone() -> None:
    weight = QuantizedWeight(
        Code.INT8,
        torch.tensor([[1, 2, 3]], dtype=torch.int8),
        torch.tensor([[10.0, 100.0]]),
        torch.tensor([[1, 0]], dtype=torch.int8),
        group_size=2,
        order=torch.tensor([2, 0, 1]),
    )
    assert weight.dequantize(torch.float32).tolist() == [[10.0, 300.0, 0.0]]


def test_parts_are_stacked_only_where_they_agree() -> None:
    one, other = drawn("int8", 3, 8), drawn("int8 with zeros", 2, 8)
    whole = stack([one, other])
    assert whole is not None and whole.zeros is not None
    assert whole.zeros.flatten().tolist() == [0, 0, 0, 0, 1]
    assert torch.equal(whole.dequantize(torch.float32)[3:], other.dequantize(torch.float32))
    assert stack([one, drawn("fp8", 2, 8)]) is None
    assert stack([drawn_int4(2, 48, 24), drawn_int4(3, 48, 24)]) is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("kind", ["int8", "int8 with zeros", "fp8", "int4"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 32), (72, 430), (100, 300)])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize("has_integers", [True, False])
def test_compiled_products_round_no_more_than_unquantized_ones(
    has_integers: bool,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    library = native_library(dtype)
    if not library.packs:
        pytest.skip(f"this CPU has no instructions for {dtype}")
    weight, bias = drawn(kind, num_outputs, num_inputs), draw(num_outputs, seed=1).to(dtype)
    matrix, x = Linear(bias=bias), draw(num_rows, num_inputs, seed=2).to(dtype)
    if not has_integers:
        library = copy.copy(library)
        library.max_integer_group = 0
    quantizer = NativeQuantizer(library)
    assert quantizer.serves(weight)
    quantizer(matrix, weight)
    expected = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    error = (matrix(x).double() - expected).abs().max() / expected.abs().max()
    assert float(error) <= tolerance


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_an_input_that_is_no_number_gives_none(kind: str) -> None:
    library = native_library(torch.bfloat16)
    if not library.packs:
        pytest.skip("this CPU has no instructions for bfloat16")
    x = draw(3, 300).bfloat16()
    x[0, 7], x[1, 299] = torch.nan, torch.inf
    matrix = Linear()
    NativeQuantizer(library)(matrix, drawn(kind, 20, 300))
    assert matrix(x).isfinite().all(1).tolist() == [False, False, True]
    assert not matrix(x[:2]).isfinite().any()


def test_integers_of_a_row_lose_less_than_a_bit_of_bfloat16_beside_a_large_input() -> None:
    library = native_library(torch.bfloat16)
    if not library.packs:
        pytest.skip("this CPU has no instructions for bfloat16")
    x, weight = draw(4, 256).bfloat16(), drawn("int8", 64, 256)
    x[:, 100] = 1000
    matrix = Linear()
    NativeQuantizer(library)(matrix, weight)
    exact = x.double() @ weight.dequantize(torch.float64).T
    error = (matrix(x).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 0.02 * 256**0.5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fp8_number_is_read_exactly(dtype: torch.dtype) -> None:
    library = native_library(dtype)
    if not library.packs:
        pytest.skip(f"this CPU has no instructions for {dtype}")
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()].view(1, -1)
    matrix = Linear()
    weight = QuantizedWeight(Code.FP8, numbers, torch.ones(1, 1), None, numbers.shape[1])
    NativeQuantizer(library)(matrix, weight)
    found = matrix(torch.eye(numbers.shape[1], dtype=dtype))
    assert torch.equal(found.flatten().float(), numbers.flatten().float())


def test_groups_of_an_odd_size_are_written_out() -> None:
    weight = drawn_int4(3, 12, 3)
    storage = MatrixStorage(torch.float32, kernels=NativeQuantizer(native_library(torch.float32)))
    matrix = Linear()
    storage.keep_quantized(matrix, weight)
    assert matrix.weight is not None
    assert torch.equal(matrix.weight, weight.dequantize(torch.float32))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StartupError, match=r"quantization int3 .*; supported: none, int8, fp8"):
        scheme_of("int3")
