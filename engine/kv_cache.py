"""The paged KV cache: one contiguous buffer of equal blocks, and how many of them fit.

A block holds `block_size` tokens of every layer, KV heads before tokens:
`[num_layers, 2, num_kv_heads, block_size, head_dim]`. So a block is one range of bytes to
move, and one (layer, key or value, head) of it is one contiguous row to gather.

In fp8 (`engine.fp8`) each layer has a tail of float32 scales, `[2, num_kv_heads, block_size]`. They
lie with their layer and not at the block's end, so that a group of layers stays one range to move.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.errors import StartupError
from engine.fp8 import SCALE_BYTES
from engine.memory import untouched_zeros

LAYOUT_NAME = "LKHTD1"
"""Layers, Keys and values, Heads, Tokens, head Dimension; version 1. Part of a fingerprint."""

_DEFAULT_BYTES = 4 << 30
_DEFAULT_SHARE = 0.25


@dataclass(frozen=True)
class BlockShape:
    """Shape of one block."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    """Of the keys and values that attention computes with."""
    is_fp8: bool = False
    """Whether they are kept as e4m3 numbers with scales."""

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        row_bytes = self.head_dim * self.dtype.itemsize
        if self.is_fp8:
            row_bytes = self.head_dim + SCALE_BYTES
        return 2 * self.num_kv_heads * self.block_size * row_bytes

    @property
    def layout_name(self) -> str:
        """What two pods must agree on beside the sizes."""
        return f"{LAYOUT_NAME}-e4m3" if self.is_fp8 else LAYOUT_NAME


class KVCache:
    """The memory of all blocks, zeroed. Lives as long as the engine."""

    def __init__(self, shape: BlockShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        dimensions: tuple[int, ...] = (num_blocks, shape.num_layers, *self._row_dimensions)
        dtype = shape.dtype
        if shape.is_fp8:
            dimensions = (num_blocks, shape.num_layers, shape.layer_bytes)
            dtype = torch.uint8
        if device.type == "cpu":
            self.data = untouched_zeros(self.num_bytes, dtype).view(dimensions)
        else:
            self.data = torch.zeros(dimensions, dtype=dtype, device=device)

    @property
    def _row_dimensions(self) -> tuple[int, int, int, int]:
        shape = self.shape
        return (2, shape.num_kv_heads, shape.block_size, shape.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.shape.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def data_ptr(self) -> int:
        """Address of block 0; block i begins `i * block_bytes` later."""
        return self.data.data_ptr()

    def layer(self, index: int) -> torch.Tensor:
        """View [num_blocks, 2, num_kv_heads, block_size, head_dim], strided by blocks.

        In fp8 the numbers' bits, uint8.
        """
        if not self.shape.is_fp8:
            return self.data[:, index]
        bits = self.data[:, index, : math.prod(self._row_dimensions)]
        return bits.view(self.num_blocks, *self._row_dimensions)

    def scales(self, index: int) -> torch.Tensor:
        """In fp8: view [num_blocks, 2, num_kv_heads, block_size] float32, strided by blocks."""
        tail = self.data[:, index, math.prod(self._row_dimensions) :]
        return tail.view(torch.float32).view(self.num_blocks, *self._row_dimensions[:3])

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks: (source, destination), all sources before any destination."""
        if pairs:
            sources, destinations = torch.tensor(pairs, device=self.data.device).T
            self.data[destinations] = self.data[sources]

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Zeroes blocks that are about to be filled only in part.

        What stands behind a mask still takes part in the arithmetic, so the unwritten end of
        a block must be finite, whatever its last user left there.
        """
        if block_ids:
            index = torch.tensor(block_ids, device=self.data.device)
            self.data.index_fill_(0, index, 0)


@dataclass(frozen=True)
class MemoryBudget:
    """What the KV cache gets where nobody says how much."""

    num_bytes: int
    origin: str
    """How it came to that, for the error if it is too little."""


def cpu_budget(available_bytes: int) -> MemoryBudget:
    """A quarter of the memory available, at most 4 GiB."""
    return MemoryBudget(
        min(_DEFAULT_BYTES, int(available_bytes * _DEFAULT_SHARE)),
        f"a quarter of the {available_bytes} bytes of memory available",
    )


def gpu_budget(
    total_bytes: int, free_bytes: int, reserved_bytes: int, utilization: float
) -> MemoryBudget:
    """What `utilization` of a GPU leaves beside what is in use, weights included, and what the
    steps will take."""
    used = total_bytes - free_bytes
    return MemoryBudget(
        max(0, int(total_bytes * utilization) - used - reserved_bytes),
        f"{utilization:g} of the GPU's {total_bytes} bytes, less {used} in use and "
        f"{reserved_bytes} for a step and its graphs",
    )


def decide_num_blocks(
    block_bytes: int,
    num_blocks_override: int | None,
    memory_bytes: int | None,
    default: Callable[[], MemoryBudget],
) -> int:
    """Number of blocks: the override, else what fits the memory given, else the default.

    `default` is asked only where it counts. Raises StartupError when not one block fits.
    """
    if num_blocks_override is not None:
        if num_blocks_override < 1:
            raise StartupError(
                f"num_gpu_blocks_override must be at least 1, is {num_blocks_override}"
            )
        return num_blocks_override
    if memory_bytes is not None:
        budget = MemoryBudget(memory_bytes, "kv_cache_memory_bytes")
    else:
        budget = default()
    num_blocks = budget.num_bytes // block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"no room for a single KV block: a block takes {block_bytes} bytes, "
            f"the KV cache gets {budget.num_bytes} ({budget.origin})"
        )
    return num_blocks


def available_memory() -> int:
    """Bytes that this machine or container can still give."""
    return min(_machine_memory(), _container_memory())


def _machine_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_memory() -> int:
    """What is left under the control group's limit (version 2); all there is without one."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return max(0, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return 1 << 62
