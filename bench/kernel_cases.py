"""Cases in which a kernel must agree with its eager reference; for tests and for bench.gpu.

Yardstick is the reference in float64. A kernel may err by so much more than the reference in
the kernel's own dtype: `FACTOR` times, and one rounding of the largest result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import rms_norm, silu

from core.sampling import SamplingParams
from engine.attention import ReferenceAttention, SequenceChunk
from engine.attention.triton import TritonAttention, TritonSettings
from engine.kernels.activation import silu_and_multiply
from engine.kernels.norms import add_rms_norm
from engine.kernels.rotary_write import HeadNorms, RotaryRows, rotate_and_write
from engine.kernels.sampling import SamplingRows, sample_rows
from engine.kv_cache import BlockShape, KVCache
from engine.rope import Rope, RopeConfig, rotate
from engine.sampler import draw

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

    def run(self, device: torch.device) -> Errors:
        """Second layer of two; blocks that belong to nobody are full of NaN."""
        chunks = self._tables()
        num_blocks = 1 + max(block for chunk in chunks for block in chunk.block_table)
        cache = self._filled_cache(num_blocks + 2, chunks)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        query = random(1, num_tokens, self.num_heads, self.head_dim).to(self.dtype)
        kv = random(2, num_tokens, 2, self.num_kv_heads, self.head_dim).to(self.dtype)
        slots = slots_of(chunks, self.block_size)
        eager = self._reference(cache, chunks, slots, query, kv)
        double = KVCache(self._shape(torch.float64), cache.num_blocks, cache.data.device)
        double.data.copy_(cache.data)
        exact = self._reference(double, chunks, slots, query.double(), kv.double())
        on_device = KVCache(self._shape(self.dtype), cache.num_blocks, device)
        on_device.data.copy_(cache.data)
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


@dataclass(frozen=True)
class RotaryCase:
    """Norms, rotation and KV write of five tokens, one of which has no slot."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    has_norms: bool = True
    dtype: torch.dtype = torch.float32
    slots: tuple[int, ...] = (3, 17, -1, 40, 32)

    def run(self, device: torch.device) -> Errors:
        """Queries and the whole cache, as one row of numbers."""
        num_all = self.num_heads + 2 * self.num_kv_heads
        qkv = random(0, len(self.slots), num_all * self.head_dim).to(self.dtype)
        weights = [(1 + 0.1 * random(seed, self.head_dim)).to(self.dtype) for seed in (1, 2)]
        positions = torch.arange(len(self.slots)) * 1000
        rope = Rope(RopeConfig(self.head_dim, 10000.0), device)
        cache = self._cache(self.dtype, device)
        norms = None
        if self.has_norms:
            norms = HeadNorms(weights[0].to(device), weights[1].to(device), 1e-6)
        slots = torch.tensor(self.slots, device=device)
        rows = RotaryRows(*rope.half_angles(positions.to(device)), slots)
        query = rotate_and_write(qkv.clone().to(device), cache.layer(1), rows, norms)
        got = torch.cat([query.flatten(), cache.data.flatten()])
        return Errors.of(
            got,
            self._eager(qkv, weights, positions, self.dtype),
            self._eager(qkv, weights, positions, torch.float64),
        )

    def _cache(self, dtype: torch.dtype, device: torch.device) -> KVCache:
        num_blocks = max(self.slots) // self.block_size + 1
        shape = BlockShape(2, self.num_kv_heads, self.block_size, self.head_dim, dtype)
        return KVCache(shape, num_blocks, device)

    def _eager(
        self,
        qkv: torch.Tensor,
        weights: list[torch.Tensor],
        positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        heads = qkv.to(dtype).view(len(qkv), -1, self.head_dim)
        query, keys, values = torch.split(
            heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        if self.has_norms:
            query, keys = (
                rms_norm(x, weight.shape, weight.to(dtype), 1e-6)
                for x, weight in zip((query, keys), weights, strict=True)
            )
        rope = Rope(RopeConfig(self.head_dim, 10000.0), torch.device("cpu"))
        angles = rope.angles(positions, dtype)
        query, keys = rotate(query, *angles), rotate(keys, *angles)
        cache = self._cache(dtype, torch.device("cpu"))
        for token, slot in enumerate(self.slots):
            if slot >= 0:
                block, offset = divmod(slot, self.block_size)
                cache.layer(1)[block, 0, :, offset] = keys[token]
                cache.layer(1)[block, 1, :, offset] = values[token]
        return torch.cat([query.flatten(), cache.data.flatten()])


@dataclass(frozen=True)
class RowCase:
    """A kernel on rows of one size: "norm" (addition and RMSNorm) or "gate" (SiLU)."""

    kernel: str
    size: int
    dtype: torch.dtype = torch.float32
    num_rows: int = 3

    def run(self, device: torch.device) -> Errors:
        """The results that later layers see, as one row of numbers."""
        x = random(0, self.num_rows, 2 * self.size).to(self.dtype)
        weight = (1 + 0.1 * random(1, self.size)).to(self.dtype)
        own = x.to(device)
        if self.kernel == "gate":
            got = silu_and_multiply(own)
            return Errors.of(got, self._gate(x), self._gate(x.double()))
        residual, added = own[:, : self.size].clone(), own[:, self.size :].contiguous()
        normed = add_rms_norm(residual, added, weight.to(device), 1e-5)
        got = torch.cat([residual, normed])
        return Errors.of(got, self._norm(x, weight), self._norm(x.double(), weight.double()))

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x[:, : self.size] + x[:, self.size :]
        return torch.cat([total, rms_norm(total, weight.shape, weight, 1e-5)])


@dataclass(frozen=True)
class SamplingCase:
    """One row for each of `params`, with the sampler's own draws as the expectation."""

    vocab_size: int = 5000
    dtype: torch.dtype = torch.float32
    step: float = 0.0
    """Logits are multiples of it, so that many are equal; 0 leaves them as drawn."""
    scale: float = 3.0
    params: tuple[SamplingParams, ...] = field(
        default_factory=lambda: tuple(
            SamplingParams(max_tokens=1, temperature=temperature, top_k=k, top_p=p, min_p=m)
            for temperature, k, p, m in (
                (0.0, 0, 1.0, 0.0),
                (0.7, 0, 1.0, 0.0),
                (1.0, 0, 1.0, 0.1),
                (1.3, 5, 1.0, 0.0),
                (1.0, 0, 0.9, 0.0),
                (1.0, 40, 0.5, 0.0),
                (2.0, 100, 1.0, 0.2),
                (1.0, 1, 0.99, 0.0),
            )
        )
    )

    def run(self, device: torch.device) -> tuple[list[int], list[int]]:
        """Token ids: the kernel's, the sampler's."""
        logits = self.scale * random(0, len(self.params), self.vocab_size)
        if self.step:
            logits = (logits / self.step).round() * self.step
        logits = logits.to(self.dtype)
        numbers = torch.rand(len(self.params), generator=torch.Generator().manual_seed(9)).double()
        rows = SamplingRows(
            temperature=torch.tensor([each.temperature for each in self.params], device=device),
            top_k=torch.tensor(
                [each.top_k for each in self.params], dtype=torch.int32, device=device
            ),
            top_p=torch.tensor([each.top_p for each in self.params], device=device),
            min_p=torch.tensor([each.min_p for each in self.params], device=device),
            number=numbers.to(device),
        )
        expected = [
            self._choice(row, each, number)
            for row, each, number in zip(logits, self.params, numbers.tolist(), strict=True)
        ]
        return sample_rows(logits.to(device), rows).tolist(), expected

    def _choice(self, row: torch.Tensor, params: SamplingParams, number: float) -> int:
        if not row.max().isfinite():
            return -1
        return int(row.argmax()) if params.is_greedy else draw(row.double(), params, number)


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
