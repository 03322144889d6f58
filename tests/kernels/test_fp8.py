"""What the kernels write in fp8, against PyTorch's own conversion, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from engine.fp8 import dequantize, quantize
from engine.kernels.rotary_write import HeadNorms, RotaryRows, rotate_and_write
from engine.kernels.tiles import from_e4m3, to_e4m3
from engine.kv_cache import BlockShape, KVCache

CPU = torch.device("cpu")
TILE = 256


@triton.jit
def to_kernel(bits_ptr, number_ptr, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(bits_ptr + offsets, to_e4m3(tl.load(number_ptr + offsets)))


@triton.jit
def from_kernel(number_ptr, bits_ptr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    numbers = from_e4m3(tl.load(bits_ptr + offsets)).to(tl.float32)
    tl.store(number_ptr + offsets, numbers * 256.0)


def finite_numbers() -> torch.Tensor:
    """All of e4m3, by bits; the two not-a-numbers are left out."""
    every = torch.arange(256, dtype=torch.uint8)
    return every[every & 0x7F != 0x7F]


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    exact = finite_numbers().view(torch.float8_e4m3fn).float().sort().values.unique()
    ties = (exact[1:] + exact[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10 ** (3 * torch.rand(4000, generator=generator) - 4)
    spread = magnitudes * torch.randn(4000, generator=generator)
    numbers = torch.cat([exact, ties, torch.nextafter(ties, torch.tensor(9e9)), spread])
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % TILE)]).clamp(-448, 448)
    bits = torch.empty(len(numbers), dtype=torch.uint8)
    to_kernel[(len(numbers) // TILE,)](bits, numbers, TILE=TILE)
    expected = numbers.to(torch.float8_e4m3fn)
    assert torch.equal(bits.view(torch.float8_e4m3fn).float(), expected.float())


def test_every_number_is_read_as_what_it_is() -> None:
    bits = torch.zeros(TILE, dtype=torch.uint8)
    finite = finite_numbers()
    bits[: len(finite)] = finite
    numbers = torch.empty(TILE)
    from_kernel[(1,)](numbers, bits, TILE=TILE)
    assert torch.equal(numbers, bits.view(torch.float8_e4m3fn).float())


def written(qkv: torch.Tensor, *, is_fp8: bool, has_norms: bool = True) -> KVCache:
    """The cache after four tokens of six query and two KV heads, one without a slot."""
    cache = KVCache(BlockShape(2, 2, 16, 64, torch.float32, is_fp8), 3, CPU)
    slots = torch.tensor([3, 17, -1, 40])
    angles = torch.arange(4 * 32.0).view(4, 32)
    rows = RotaryRows(angles.cos(), angles.sin(), slots)
    weight = torch.linspace(0.5, 1.5, 64)
    norms = HeadNorms(weight, weight, 1e-6) if has_norms else None
    scales = cache.scales(1) if is_fp8 else None
    rotate_and_write(qkv.clone(), cache.layer(1), rows, norms, scales)
    return cache


@pytest.mark.parametrize("has_norms", [True, False])
def test_keys_and_values_are_written_as_quantized_ones(has_norms: bool) -> None:
    qkv = torch.randn(4, 10 * 64, generator=torch.Generator().manual_seed(1))
    exact = written(qkv, is_fp8=False, has_norms=has_norms).layer(1)
    cache = written(qkv, is_fp8=True, has_norms=has_norms)
    bits, scales = quantize(exact)
    assert torch.equal(cache.layer(1), bits) and torch.equal(cache.scales(1), scales)
    assert cache.data[:, 0].count_nonzero() == 0


def test_a_row_with_a_number_that_is_not_finite_is_not_finite() -> None:
    qkv = torch.ones(4, 10 * 64)
    qkv[0, -1], qkv[1, -1] = float("nan"), float("inf")
    cache = written(qkv, is_fp8=True, has_norms=False)
    rows = dequantize(cache.layer(1), cache.scales(1), torch.float32)
    is_bad = (~rows.isfinite()).any(-1).nonzero().tolist()
    assert is_bad == [[0, 1, 1, 3], [1, 1, 1, 1]]
