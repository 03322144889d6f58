"""The contract of paged attention.

A step's tokens lie one after the other in the order of its chunks. The backend looks at the
chunks once (`prepare`), so that what follows in every layer (`attend`) is tensor work only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceChunk:
    """Tokens [start, start + num_tokens) of one sequence, whose KV lies in `block_table`."""

    start: int
    num_tokens: int
    block_table: list[int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class StepAttention(ABC):
    """Attention of one step; valid until the next `prepare`."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Writes the step's keys and values into the cache, then attends over all of them.

        `query`: [T, num_heads, head_dim], `key_value`: [T, 2, num_kv_heads, head_dim], both
        rotated and of the cache's dtype; query head h reads KV head h // (heads / KV heads).
        A token at position p sees positions max(0, p - window + 1) to p of its sequence.
        Returns [T, num_heads * head_dim].
        """


class AttentionBackend(ABC):
    """Attention over one KV cache."""

    reads_masked_keys = True
    """Whether keys that a mask hides are read, so that the unwritten end of a block must be
    finite."""

    @abstractmethod
    def prepare(self, chunks: Sequence[SequenceChunk], slot_mapping: list[int]) -> StepAttention:
        """Plans one step.

        `slot_mapping` names the slot to which each token's KV is written; -1 writes none.
        """
