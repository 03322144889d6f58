"""A decoder's small operations by the compiled kernels: each reads and writes once."""

from __future__ import annotations

import torch

from engine.native.library import Library
from engine.ops import Angles, DecoderOps, HeadLayout
from engine.rope import Rope


class NativeOps(DecoderOps):
    """Of the library's element type; tensors are contiguous but for what a step gives back."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def add_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert hidden.is_contiguous() and (update is None or update.is_contiguous())
        normed = torch.empty_like(hidden)
        self._library.add_norm(
            hidden.data_ptr(),
            None if update is None else update.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            *hidden.shape,
            eps,
            torch.get_num_threads(),
        )
        return normed

    def angles(self, rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        return rope.cos_sin(positions)

    def rotate(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        angles: Angles,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert qkv.is_contiguous()
        num_heads, num_kv_heads, head_dim = layout.num_heads, layout.num_kv_heads, layout.head_dim
        cos, sin = angles
        query_norm, key_norm = norms or (None, None)
        self._library.rotate(
            qkv.data_ptr(),
            qkv.shape[0],
            qkv.shape[1],
            num_heads,
            num_kv_heads,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            eps,
            torch.get_num_threads(),
        )
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        return heads[:, :num_heads], heads[:, num_heads:].view(-1, 2, num_kv_heads, head_dim)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape
        output = gate_up.new_empty((rows, size // 2))
        self._library.gate(
            gate_up.data_ptr(), output.data_ptr(), rows, size // 2, torch.get_num_threads()
        )
        return output

    def largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        num_rows, size = logits.shape
        values = torch.empty(num_rows, dtype=torch.float32)
        indices = torch.empty(num_rows, dtype=torch.int64)
        self._library.largest(
            logits.data_ptr(),
            num_rows,
            size,
            values.data_ptr(),
            indices.data_ptr(),
            torch.get_num_threads(),
        )
        return values, indices
