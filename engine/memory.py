"""Host memory from the system itself, in huge pages where it has them."""

from __future__ import annotations

import mmap

import torch

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
"""Bytes of a cache line, with which every tensor of an arena begins."""


def untouched_zeros(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [num_bytes / itemsize] that take memory only where somebody writes.

    `torch.zeros` touches every page: seconds of start-up, and a pool's whole size resident
    from the first moment on.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


class Arena:
    """Tensors that live long, side by side in large mappings: huge pages serve small ones, too.

    What reads a whole model in every step would else wait for page tables. A mapping is given
    back with the last of its tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._free = torch.empty(0, dtype=dtype)

    def take(self, count: int) -> torch.Tensor:
        """Zeros [count]."""
        itemsize = self._free.itemsize
        num_bytes = -(-count * itemsize // _ALIGNMENT) * _ALIGNMENT
        if len(self._free) * itemsize < num_bytes:
            self._free = untouched_zeros(max(num_bytes, _CHUNK_BYTES), self._free.dtype)
        taken = self._free[:count]
        self._free = self._free[num_bytes // itemsize :]
        return taken
