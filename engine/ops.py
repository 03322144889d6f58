"""What a decoder does between its matrices: norms, rotation, the gated activation, the largest
logits.

`TorchOps` is the specification and runs on every device; `engine.native.ops` has the fast
way for CPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, silu

from engine.rope import Rope, rotate

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadLayout:
    """A row of the fused projection: queries of all heads, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class DecoderOps(ABC):
    """Operations on rows of one dtype; sums and functions are computed in float32."""

    @abstractmethod
    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `update` to `hidden` in place, then RMSNorm of the sum, [T, hidden_size] all."""

    @abstractmethod
    def angles(self, rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """What `rotate` needs to know of the step's positions, int64 [T]."""

    @abstractmethod
    def rotate(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        angles: Angles,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, num_heads, head_dim] and keys with values [T, 2, num_kv_heads, head_dim].

        Both rotated, after an RMSNorm of each head with `norms` (of queries, of keys) where
        the model has them. `qkv` is [T, all heads * head_dim] and is used up.
        """

    @abstractmethod
    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, size], of [T, 2 * size]."""

    @abstractmethod
    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each row [rows, vocab_size], NaN if there is one, and its index, int64;
        [rows] both."""


class TorchOps(DecoderOps):
    """With PyTorch's own kernels."""

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if update is not None:
            hidden += update
        return rms_norm(hidden, weight.shape, weight, eps)

    def angles(self, rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        return rope.angles(positions, dtype)

    def rotate(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        angles: Angles,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, layout.head_dim)
        # Keys go back in their place, so that they lie beside the values.
        keys = heads[:, num_heads : num_heads + num_kv_heads]
        if norms is None:
            rotated = rotate(heads[:, : num_heads + num_kv_heads], *angles)
            query = rotated[:, :num_heads]
            keys.copy_(rotated[:, num_heads:])
        else:
            query_norm, key_norm = norms
            query = rms_norm(heads[:, :num_heads], query_norm.shape, query_norm, eps)
            query = rotate(query, *angles)
            keys.copy_(rotate(rms_norm(keys, key_norm.shape, key_norm, eps), *angles))
        return query, heads[:, num_heads:].view(-1, 2, num_kv_heads, layout.head_dim)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = logits.max(dim=-1)
        return values, indices
