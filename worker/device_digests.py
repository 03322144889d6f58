"""Digests of KV blocks that lie on a GPU, where they are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import xxhash

from engine.kernels.digests import LEAST_BYTES, WORD_BYTES, digest_ranges


class DeviceDigests:
    """Digests of ranges of one tensor's bytes, in the stream of its own thread's making.

    So they wait neither for the steps that run meanwhile, nor these for them.
    """

    def __init__(self, data: torch.Tensor) -> None:
        """`data` is contiguous, like a KV cache's."""
        self._bytes = data.view(-1).view(torch.uint8)
        self._stream = torch.cuda.Stream(data.device) if data.is_cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def __call__(self, starts: Sequence[int], num_bytes: int) -> list[int]:
        """XXH3-64 of the `num_bytes` from each of `starts` on."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if num_bytes < LEAST_BYTES or any(n % WORD_BYTES for n in (num_bytes, *starts)):
                return [self._on_host(start, num_bytes) for start in starts]
            words = self._bytes[: len(self._bytes) // WORD_BYTES * WORD_BYTES].view(torch.int64)
            return digest_ranges(words, [start // WORD_BYTES for start in starts], num_bytes)

    def _on_host(self, start: int, num_bytes: int) -> int:
        """What only models of a few numbers have: ranges that are not of whole words, or short."""
        return xxhash.xxh3_64_intdigest(
            self._bytes[start : start + num_bytes].cpu().numpy().tobytes()
        )
