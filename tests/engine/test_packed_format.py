"""Packed integers of compressed-tensors, read from words that are written out here."""

from __future__ import annotations

import pytest
import torch

from core.errors import StartupError
from engine.quantization.formats import PackedFormat
from engine.quantization.weight import Code

WORDS = [[0x76543210, 0x0ECA8642]]
"""One output of 16 inputs; the lowest four bits come first, and 8 stands for nothing."""
SCALES = [[0.5, 2.0]]


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": torch.tensor(WORDS, dtype=torch.int32),
        "weight_scale": torch.tensor(SCALES, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([1, 16]),
        **more,
    }


def test_four_bits_are_read_from_the_lowest_on_less_eight_times_the_group_s_scale() -> None:
    weight = PackedFormat(4, 8).read(tensors(), 1, 16)
    assert weight.code is Code.INT4
    assert weight.zeros is None
    assert weight.dequantize(torch.float32).tolist() == [
        [
            *(-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5),
            *(-12.0, -8.0, -4.0, 0.0, 4.0, 8.0, 12.0, -16.0),
        ]
    ]


def test_zero_points_are_packed_along_the_outputs() -> None:
    # Words of the outputs 0 to 7: zero points 8 to 15 in the first group, 7 to 0 in the second.
    zeros = torch.tensor([[0xFEDCBA98 - (1 << 32), 0x01234567]], dtype=torch.int32)
    packed = torch.full((8, 2), 0x77777777, dtype=torch.int32)
    given = {
        "weight_packed": packed,
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 16]),
        "weight_zero_point": zeros,
    }
    weight = PackedFormat(4, 8, has_zeros=True).read(given, 8, 16)
    assert weight.dequantize(torch.float32)[:, ::8].tolist() == [
        *([-1.0, 0.0], [-2.0, 1.0], [-3.0, 2.0], [-4.0, 3.0]),
        *([-5.0, 4.0], [-6.0, 5.0], [-7.0, 6.0], [-8.0, 7.0]),
    ]


def test_each_input_has_the_scale_of_the_group_that_it_is_said_to_be_in() -> None:
    groups = torch.arange(16, dtype=torch.int32) % 2
    weight = PackedFormat(4, 8).read(tensors(weight_g_idx=groups), 1, 16)
    assert weight.dequantize(torch.float32).tolist() == [
        [
            *(-4.0, -14.0, -3.0, -10.0, -2.0, -6.0, -1.0, -2.0),
            *(-3.0, -8.0, -1.0, 0.0, 1.0, 8.0, 3.0, -16.0),
        ]
    ]


def test_eight_bits_are_a_byte_each_less_128() -> None:
    given = tensors(
        weight_packed=torch.tensor([[0x7F800081, 0x010203FF]], dtype=torch.int32),
        weight_scale=torch.tensor([[2.0]]),
        weight_shape=torch.tensor([1, 8]),
    )
    weight = PackedFormat(8, -1).read(given, 1, 8)
    assert weight.code is Code.INT8
    expected = [2.0, -256.0, 0.0, -2.0, 254.0, -250.0, -252.0, -254.0]
    assert weight.dequantize(torch.float32).tolist() == [expected]


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "message"),
    [
        (1, 12, "12 integers of 4 bits do not fill words of 32"),
        (4, 16, "4 integers of 4 bits do not fill words of 32"),
    ],
)
def test_what_does_not_fill_words_is_refused(
    num_outputs: int, num_inputs: int, message: str
) -> None:
    given = {
        "weight_packed": torch.zeros(num_outputs, 2, dtype=torch.int32),
        "weight_scale": torch.ones(num_outputs, 2),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
        "weight_zero_point": torch.zeros(1, 2, dtype=torch.int32),
    }
    with pytest.raises(StartupError, match=message):
        PackedFormat(4, 8, has_zeros=True).read(given, num_outputs, num_inputs)
