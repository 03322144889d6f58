"""Digests of KV blocks: does decode hold the bytes that prefill computed?

XXH3 is a fast non-cryptographic hash (tens of GB/s): it finds damage, not forgery, and overlooks
one damaged block in 2**64. Digests are computed in a thread of their own, since a long prompt's
blocks are many megabytes.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from kvtransfer.base import BlockPart, MemoryRegion

Ranges = Callable[[Sequence[int], int], list[int]]
"""The XXH3-64 digests of ranges of a region: where each begins, and the bytes of all of them."""

SAMPLE_EVERY = 8
"""With sampling, one block in so many is verified."""


@dataclass(frozen=True)
class DigestPlan:
    """Which blocks of a request are verified: every `every`-th, counted from `offset`."""

    every: int = 0
    """0: none."""
    offset: int = 0

    def indices(self, first: int, end: int) -> list[int]:
        """Indices in the block table, from `first` up to `end`, that have a digest."""
        if self.every == 0:
            return []
        return [index for index in range(first, end) if index % self.every == self.offset]


class BlockDigests:
    """Computes digests of the blocks of one memory region."""

    def __init__(self, region: MemoryRegion, ranges: Ranges | None = None) -> None:
        """`ranges` computes them where the region is; None: in host memory."""
        self._ranges = host_ranges(region) if ranges is None else ranges
        self._region = region
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digest")

    async def of(self, block_ids: Sequence[int], part: BlockPart | None = None) -> list[int]:
        """The 64-bit digest of each block, or of the same part of each, as it is now."""
        if not block_ids:
            return []
        part = part or self._region.whole_block
        assert part.is_inside(self._region.block_bytes), f"{part} is not inside a block"
        loop = asyncio.get_running_loop()
        starts = [block * self._region.block_bytes + part.offset for block in block_ids]
        return await loop.run_in_executor(self._thread, self._ranges, starts, part.num_bytes)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)


def host_ranges(region: MemoryRegion) -> Ranges:
    """For a region of host memory, which must outlive it."""
    memory = memoryview((ctypes.c_char * region.num_bytes).from_address(region.address))

    def compute(starts: Sequence[int], num_bytes: int) -> list[int]:
        return [xxhash.xxh3_64_intdigest(memory[start : start + num_bytes]) for start in starts]

    return compute
