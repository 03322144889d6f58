"""A matrix as small codes with scales: what every scheme of quantization becomes when loaded.

    weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g],    g = i // group_size

So there is one type for int8, fp8 and int4, with a scale per output or per group of inputs, with
zero points or without; and a kernel that multiplies with it is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch


class Code(Enum):
    """How one weight is written."""

    INT8 = "int8"
    """A tensor of int8, [out, in]."""
    FP8 = "fp8"
    """A tensor of float8_e4m3fn, [out, in] (Micikevicius et al., arXiv 2209.05433)."""
    INT4 = "int4"
    """A tensor of uint8, [out, in / 2]: inputs 2j and 2j + 1 in the low and the high half of
    byte j, each with 8 added."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self]

    @property
    def per_byte(self) -> int:
        return 2 if self is Code.INT4 else 1


INT4_OFFSET = 8
_DTYPES = {Code.INT8: torch.int8, Code.FP8: torch.float8_e4m3fn, Code.INT4: torch.uint8}


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in] in codes."""

    code: Code
    codes: torch.Tensor
    scales: torch.Tensor
    """[out, groups], floating."""
    zeros: torch.Tensor | None
    """int8 [out, groups]; None: all of them 0."""
    group_size: int
    """Inputs that share a scale; the last group may be smaller."""
    order: torch.Tensor | None = None
    """int64 [in]: the j-th column belongs to input order[j]; None: to input j."""

    def __post_init__(self) -> None:
        assert self.codes.dtype == self.code.dtype
        num_groups = -(-self.num_inputs // self.group_size)
        assert self.scales.shape == (self.num_outputs, num_groups)
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * self.code.per_byte

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on `device`."""
        return QuantizedWeight(
            self.code,
            self.codes.to(device),
            self.scales.to(device),
            None if self.zeros is None else self.zeros.to(device),
            self.group_size,
            None if self.order is None else self.order.to(device),
        )

    def integers(self) -> torch.Tensor:
        """Codes of INT8 or INT4 as int8 [out, in]."""
        assert self.code is not Code.FP8
        return self.codes if self.code is Code.INT8 else unpack_int4(self.codes)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [out, in], columns in the order of the inputs; rounded once, to `dtype`."""
        values = (self.codes if self.code is Code.FP8 else self.integers()).float()
        if self.zeros is not None:
            values -= self._per_input(self.zeros).float()
        values *= self._per_input(self.scales).float()
        if self.order is not None:
            values = values[:, self.order.argsort()]
        return values.to(dtype)

    def _per_input(self, groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(self.group_size, dim=1)[:, : self.num_inputs]


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Integers from -8 to 7, [out, in] with an even `in`, as INT4 has them."""
    halves = (codes + INT4_OFFSET).to(torch.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def unpack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] of INT4's codes."""
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    return halves.to(torch.int8) - INT4_OFFSET


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix of the outputs of all `parts`, in order; None where they do not go together."""
    if any(not _agree(one, other) for one, other in pairwise(parts)):
        return None
    first = parts[0]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros_of(part) for part in parts])
    return QuantizedWeight(
        first.code,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        first.group_size,
        first.order,
    )


def _agree(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if (one.code, one.group_size, one.scales.dtype) != (
        other.code,
        other.group_size,
        other.scales.dtype,
    ):
        return False
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)


def _zeros_of(part: QuantizedWeight) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.zeros(part.scales.shape, dtype=torch.int8, device=part.scales.device)
