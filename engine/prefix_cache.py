"""What a scheduler asks of the prefix cache for one sequence: hashes, hits, new entries."""

from __future__ import annotations

from core.hashing import block_hashes
from engine.block_pool import BlockPool
from engine.sequence import Sequence


class PrefixCache:
    """The pool's hashed blocks, seen from sequences. Disabled, it never hits nor stores."""

    def __init__(self, pool: BlockPool, *, is_enabled: bool) -> None:
        self._pool = pool
        self._is_enabled = is_enabled

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Brings `sequence.block_hashes` up to `num_blocks`, which are full of known tokens."""
        num_hashed = len(sequence.block_hashes)
        if not self._is_enabled or num_hashed >= num_blocks:
            return
        size = self._pool.block_size
        tokens = sequence.token_slice(num_hashed * size, num_blocks * size)
        parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.scope
        sequence.block_hashes += block_hashes(tokens, size, parent)

    def num_hit_tokens(self, sequence: Sequence) -> int:
        """Leading tokens that need not be computed."""
        return self._pool.match_length(self._reusable(sequence)) * self._pool.block_size

    def hits(self, sequence: Sequence) -> list[int]:
        """The blocks that hold those tokens. Takes no reference."""
        return self._pool.match_prefix(self._reusable(sequence))

    def store(self, sequence: Sequence, first: int) -> None:
        """Caches the blocks from index `first` on that are full of computed tokens."""
        end = sequence.num_computed_tokens // self._pool.block_size
        if not self._is_enabled or first >= end:
            return
        self.extend_hashes(sequence, end)
        hashes = sequence.block_hashes
        for index in range(first, end):
            parent = hashes[index - 1] if index > 0 else None
            self._pool.cache(sequence.block_table[index], hashes[index], parent)

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        if not self._is_enabled or sequence.num_prompt_logprobs is not None:
            return []
        # The newest token is always computed, for its logits, and into a block of its own.
        return sequence.block_hashes[: (sequence.num_tokens - 1) // self._pool.block_size]
