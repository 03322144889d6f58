"""Integers of 4 and 8 bits out of the int32 words in which checkpoints keep them.

The lowest bits of a word come first; words lie in memory as little-endian machines write them.
"""

from __future__ import annotations

import torch

from core.errors import StartupError
from engine.quantization.weight import pack_int4


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 4 * columns] of int32 [rows, columns]. Raises StartupError."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise StartupError(
            f"packed integers are {words.dtype} {list(words.shape)}, not a matrix of int32"
        )
    # As one row: a single column counts as contiguous with any stride, which a view refuses.
    in_bytes = words.contiguous().flatten().view(torch.uint8)
    return in_bytes.view(len(words), 4 * words.shape[1])


def integers_of(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """uint8 [rows, 32 / num_bits * columns] of int32 [rows, columns], for 4 or 8 bits."""
    in_bytes = bytes_of(words)
    if num_bits == 8:
        return in_bytes
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(1)


def centered(integers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int8: uint8 of `num_bits` less the middle of their range, modulo that range.

    What is larger than the range by a carry has wrapped to 0, as in the words themselves.
    """
    middle = 1 << (num_bits - 1)
    wrapped = integers & ((1 << num_bits) - 1)
    return (wrapped.to(torch.int16) - middle).to(torch.int8)


def codes_of(words: torch.Tensor, num_bits: int, order: torch.Tensor | None) -> torch.Tensor:
    """Codes of INT4 or INT8 out of int32 [out, in * num_bits / 32], columns in `order`."""
    if num_bits == 4 and order is None:
        return bytes_of(words)
    integers = centered(integers_of(words, num_bits), num_bits)
    if order is not None:
        integers = integers[:, order]
    return pack_int4(integers) if num_bits == 4 else integers
