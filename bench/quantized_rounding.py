"""Rounds weights to integers and small floats, for checkpoints that benchmarks and tests write."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def to_integers(
    weight: Floats, num_bits: int, groups: Integers, is_symmetric: bool = False
) -> tuple[Integers, Floats, Integers]:
    """Codes [out, in], scales and zeros [out, groups]; weight = (code - zero) * scale."""
    largest = (1 << num_bits) - 1
    num_groups = int(groups.max()) + 1
    scales = np.empty((len(weight), num_groups), np.float32)
    zeros = np.empty((len(weight), num_groups), np.int64)
    for group in range(num_groups):
        members = weight[:, groups == group]
        low, high = np.minimum(members.min(1), 0), np.maximum(members.max(1), 0)
        if is_symmetric:
            high = np.maximum(high, -low)
            low = -high
        # Checkpoints have scales in float16.
        scale = ((high - low) / largest).astype(np.float16).astype(np.float32)
        scales[:, group] = np.maximum(scale, np.float32(2**-14))
        zeros[:, group] = np.round(-low / scales[:, group])
        if is_symmetric:
            zeros[:, group] = (largest + 1) // 2
    # Version 1 of GPTQ's format cannot write a zero point of 0.
    zeros = np.clip(zeros, 1, largest)
    codes = np.round(weight / scales[:, groups]) + zeros[:, groups]
    return np.clip(codes, 0, largest).astype(np.int64), scales, zeros


def values(codes: Integers, scales: Floats, zeros: Integers, groups: Integers) -> Floats:
    """What `to_integers` has made of a weight; `groups` [in]: each input's."""
    return ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def pack_columns(
    integers: Integers, num_bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """int32 [rows, columns * bits / 32]: the i-th bits of a word are those of its order[i]-th
    column."""
    per_word = 32 // num_bits
    packed = np.zeros((len(integers), integers.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        packed |= integers[:, column::per_word].astype(np.uint32) << np.uint32(place * num_bits)
    return torch.from_numpy(packed.view(np.int32))


def halves(scales: Floats) -> torch.Tensor:
    """As checkpoints have them."""
    return torch.from_numpy(np.ascontiguousarray(scales)).half()


def to_scaled(
    weight: Floats, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in `dtype`, and a float32 scale for each block of `rows` and `columns`."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    floats = torch.from_numpy(weight)
    stored = torch.empty(floats.shape, dtype=dtype)
    scales = torch.empty(-(-len(floats) // rows), -(-floats.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = floats[block].abs().max() / largest
            scaled = floats[block] / scales[i, j]
            stored[block] = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return stored, scales
