"""Cases in which attention must agree with its eager reference; for tests and for bench.gpu.

Yardstick is the reference in float64. A kernel may err by so much more than the reference in
the kernel's own dtype: `FACTOR` times, and one rounding of the largest result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention import ReferenceAttention, SequenceChunk
from engine.attention.triton import TritonAttention, TritonSettings
from engine.fp8 import dequantize, quantize
from engine.kv_cache import BlockShape, KVCache

FACTOR = 2.0


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors against float64."""

    kernel: float
    eager: float
    rounding: float
    """A unit in the last place of the largest result."""

    @property
    def is_within(self) -> bool:
        return self.kernel <= FACTOR * self.eager + self.rounding

    @classmethod
    def of(cls, kernel: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Errors:
        kernel, eager, exact = kernel.cpu().double(), eager.cpu(), exact.cpu()
        rounding = float(exact.abs().max()) * torch.finfo(eager.dtype).eps
        return cls(_distance(kernel, exact), _distance(eager.double(), exact), rounding)


def _distance(values: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; infinite where one is not a number."""
    return float((values - exact).abs().nan_to_num(torch.inf).max())


@dataclass(frozen=True)
class AttentionCase:
    """One step's attention. `chunks`: (start, number of tokens); (-1, 1) is a row that pads."""

    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    num_processors: int = 1
    """Decides into how many parts the keys of a decoding row are split."""
    is_fp8: bool = False
    """Whether the cache holds e4m3 numbers; the references read what these stand for."""

    def run(self, device: torch.device) -> Errors:
        """Second layer of two; blocks that belong to nobody are full of NaN."""
        chunks = self._tables()
        num_blocks = 1 + max(block for chunk in chunks for block in chunk.block_table)
        cache = self._filled_cache(num_blocks + 2, chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        query = random(1, num_tokens, self.num_heads, self.head_dim).to(self.dtype)
        kv = random(2, num_tokens, 2, self.num_kv_heads, self.head_dim).to(self.dtype)
        slots = slots_of(chunks, self.block_size)
        on_device = KVCache(replace(cache.shape, is_fp8=self.is_fp8), cache.num_blocks, device)
        references = [kv, kv.double()]
        double = KVCache(self._shape(torch.float64), cache.num_blocks, cache.data.device)
        if self.is_fp8:
            bits, scales = quantize(cache.data[:, 1])
            on_device.layer(1).copy_(bits)
            on_device.scales(1).copy_(scales)
            for each in (cache, double):
                each.data[:, 1] = dequantize(bits, scales, each.shape.dtype)
            references = [dequantize(*quantize(kv), each.dtype) for each in references]
        else:
            on_device.data.copy_(cache.data)
            double.data.copy_(cache.data)
        eager = self._reference(cache, chunks, slots, query, references[0])
        exact = self._reference(double, chunks, slots, query.double(), references[1])
        settings = TritonSettings(self.num_heads, self.num_processors)
        step = TritonAttention(on_device, settings).prepare(chunks, slots)
        output = step.attend(1, query.to(device), kv.to(device), self.window)
        return Errors.of(output, eager, exact)

    def _shape(self, dtype: torch.dtype) -> BlockShape:
        return BlockShape(2, self.num_kv_heads, self.block_size, self.head_dim, dtype)

    def _tables(self) -> list[SequenceChunk]:
        """Blocks of different sequences lie interleaved."""
        tables = [max(1, -(-(start + n) // self.block_size)) for start, n in self.chunks]
        order = torch.randperm(sum(tables), generator=torch.Generator().manual_seed(3)).tolist()
        return [
            SequenceChunk(start, count, [order.pop() for _ in range(size)])
            for (start, count), size in zip(self.chunks, tables, strict=True)
        ]

    def _filled_cache(self, num_blocks: int, chunks: list[SequenceChunk]) -> KVCache:
        cache = KVCache(self._shape(self.dtype), num_blocks, torch.device("cpu"))
        cache.data.fill_(float("nan"))
        for chunk in chunks:
            for index, block in enumerate(chunk.block_table):
                # As in use: what stands behind the end is zero for the reference.
                filled = min(self.block_size, max(0, chunk.end - index * self.block_size))
                cache.data[block] = 0
                cache.data[block, ..., :filled, :] = random(
                    block, *cache.data.shape[1:4], filled, self.head_dim
                )
        return cache

    def _reference(
        self,
        cache: KVCache,
        chunks: list[SequenceChunk],
        slots: list[int],
        query: torch.Tensor,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        copy = KVCache(cache.shape, cache.num_blocks, cache.data.device)
        copy.data.copy_(cache.data)
        step = ReferenceAttention(copy).prepare(chunks, slots)
        return step.attend(1, query, kv, self.window)


def attention_sweep(dtypes: Sequence[torch.dtype]) -> list[AttentionCase]:
    """Every supported head_dim, group size and block size, not all with all."""
    chunks = ((45, 1), (-1, 1), (200, 1), (0, 70), (90, 33), (15, 1))
    heads = ((4, 4), (4, 2), (6, 2), (8, 2), (7, 1), (8, 1), (16, 1))
    sizes = itertools.cycle((16, 32, 64))
    windows = itertools.cycle((None, 33))
    return [
        AttentionCase(
            chunks, num_heads, num_kv_heads, head_dim, next(sizes), next(windows), dtype, 12
        )
        for dtype in dtypes
        for head_dim in (16, 24, 64, 80, 96, 128, 192, 256)
        for num_heads, num_kv_heads in heads
    ]


def random(seed: int, *shape: int) -> torch.Tensor:
    """Normal float32, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slots_of(chunks: list[SequenceChunk], block_size: int) -> list[int]:
    """The slot of each of the chunks' tokens; -1 of one that pads."""
    return [
        chunk.block_table[position // block_size] * block_size + position % block_size
        if position >= 0
        else -1
        for chunk in chunks
        for position in range(chunk.start, chunk.end)
    ]
