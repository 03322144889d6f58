"""XXH3-64 digests of ranges of device memory, the same numbers as a host computes.

The hash (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, the long input of XXH3) keeps eight lanes
of 64 bits. What it adds to them in one kilobyte is a sum over 16 stripes, which a tile takes at
once; between kilobytes the lanes are scrambled, one kilobyte after the other. So one program
digests one range, and the ranges, which are many, run side by side.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.step_inputs import on_device

LEAST_BYTES = 241
"""Shorter inputs are hashed another way."""
WORD_BYTES = 8
_STRIPES = 16
_MASK = (1 << 64) - 1
_PRIME_32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_INITIAL = (
    _PRIME_32[2],
    *_PRIME_64[:4],
    _PRIME_32[1],
    _PRIME_64[4],
    _PRIME_32[0],
)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The default secret of the specification."""
_LAST_OFFSET = len(_SECRET) - 64 - 7
"""Where the keys of the last 64 bytes begin."""
_MERGE_OFFSET = 11


@triton.jit
def _contribution(words_ptr, keys, rows, lanes, is_read):
    """What stripes [rows, lanes] of 64 bytes each add to the lanes: uint64 [lanes]."""
    offsets = rows[:, None] * 8 + lanes[None]
    crossed = rows[:, None] * 8 + (lanes ^ 1)[None]
    words = tl.load(words_ptr + offsets, mask=is_read, other=0).to(tl.uint64, bitcast=True)
    added = tl.load(words_ptr + crossed, mask=is_read, other=0).to(tl.uint64, bitcast=True)
    mixed = words ^ keys
    products = (mixed & 0xFFFFFFFF) * (mixed >> 32)
    return tl.sum(tl.where(is_read, products + added, 0), 0)


@triton.jit
def digest_kernel(
    lanes_ptr,
    memory_ptr,
    first_ptr,
    table_ptr,
    num_kilobytes,
    num_stripes,
    last_word,
    STRIPES: tl.constexpr,
):
    """The eight lanes, before they are merged, of one range. Grid: ranges.

    A range begins at word `first_ptr[range]`: `num_kilobytes` that are followed by something,
    `num_stripes` whole stripes, and the 64 bytes from `last_word` on. `table_ptr`: 24 words of
    the secret, 8 for the last stripe, 8 to begin with.
    """
    words_ptr = memory_ptr + tl.load(first_ptr + tl.program_id(0))
    lanes, rows = tl.arange(0, 8), tl.arange(0, STRIPES)
    keys = tl.load(table_ptr + rows[:, None] + lanes[None]).to(tl.uint64, bitcast=True)
    scramble = tl.load(table_ptr + STRIPES + lanes).to(tl.uint64, bitcast=True)
    last_keys = tl.load(table_ptr + 24 + lanes).to(tl.uint64, bitcast=True)
    state = tl.load(table_ptr + 32 + lanes).to(tl.uint64, bitcast=True)
    every = (rows >= 0)[:, None] & (lanes >= 0)[None]
    for kilobyte in range(num_kilobytes):
        state += _contribution(words_ptr + kilobyte * 128, keys, rows, lanes, every)
        state = (state ^ (state >> 47) ^ scramble) * 0x9E3779B1
    rest_ptr = words_ptr + num_kilobytes * 128
    state += _contribution(rest_ptr, keys, rows, lanes, every & (rows < num_stripes)[:, None])
    only = every & (rows == 0)[:, None]
    state += _contribution(words_ptr + last_word, last_keys[None], rows, lanes, only)
    tl.store(lanes_ptr + tl.program_id(0) * 8 + lanes, state.to(tl.int64, bitcast=True))


def digest_ranges(memory: torch.Tensor, first_words: Sequence[int], num_bytes: int) -> list[int]:
    """The digest of each range of `num_bytes`, a multiple of 8 and at least `LEAST_BYTES`.

    `memory`: int64, contiguous; ranges begin at its words `first_words`. Waits for the device.
    """
    assert num_bytes >= LEAST_BYTES and num_bytes % WORD_BYTES == 0
    firsts = on_device(torch.tensor(first_words, dtype=torch.int64), memory.device)
    table = on_device(torch.tensor(_table()), memory.device)
    lanes: list[list[int]] = digest_lanes(memory, firsts, table, num_bytes).tolist()
    return [_merge(row, num_bytes) for row in lanes]


def digest_lanes(
    memory: torch.Tensor, firsts: torch.Tensor, table: torch.Tensor, num_bytes: int
) -> torch.Tensor:
    """int64 [ranges, 8] of what `digest_ranges` says, before lanes are merged; all int64."""
    num_kilobytes, rest = divmod(num_bytes - 1, 64 * _STRIPES)
    lanes = torch.empty(len(firsts), 8, dtype=torch.int64, device=memory.device)
    digest_kernel[(len(firsts),)](
        lanes,
        memory,
        firsts,
        table,
        num_kilobytes,
        rest // 64,
        (num_bytes - 64) // WORD_BYTES,
        STRIPES=_STRIPES,
        num_warps=1,
    )
    return lanes


@functools.cache
def _table() -> list[int]:
    """See `digest_kernel`; as signed numbers."""
    last = struct.unpack_from("<8q", _SECRET, _LAST_OFFSET)
    initial = struct.unpack("<8q", struct.pack("<8Q", *_INITIAL))
    return [*struct.unpack("<24q", _SECRET), *last, *initial]


def _merge(lanes: list[int], num_bytes: int) -> int:
    """One number of the eight lanes: the end of the hash."""
    keys = struct.unpack_from("<8Q", _SECRET, _MERGE_OFFSET)
    mixed = [(lane & _MASK) ^ key for lane, key in zip(lanes, keys, strict=True)]
    total = num_bytes * _PRIME_64[0]
    for left, right in zip(mixed[::2], mixed[1::2], strict=True):
        product = left * right
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & _MASK
    return total ^ (total >> 32)
