"""Cases for the kernels that treat each row by itself; see bench.kernel_cases."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import rms_norm, silu

from bench.kernel_cases import Errors, random
from core.sampling import SamplingParams
from engine.kernels.activation import silu_and_multiply
from engine.kernels.norms import add_rms_norm
from engine.kernels.rotary_write import HeadNorms, RotaryRows, rotate_and_write
from engine.kernels.sampling import SamplingRows, sample_rows
from engine.kv_cache import BlockShape, KVCache
from engine.rope import Rope, RopeConfig, rotate
from engine.sampler import draw


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
        rows = RotaryRows(*rope.cos_sin(positions.to(device)), slots)
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
