"""Block tables for several sequences that go on from one prompt.

They share the blocks that the prompt fills. The block that it fills in part would be written
by all of them: the first sequence goes on in it, every other one in a copy (see
`Sequence.copy_source`).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool


@dataclass(frozen=True)
class Branch:
    """One sequence's blocks, and a reference of its own on each, the source's included."""

    block_table: list[int]
    copy_source: int | None = None


def num_copies(num_tokens: int, num_sequences: int, block_size: int) -> int:
    """Blocks that `num_sequences` need beside those of their common `num_tokens`."""
    return num_sequences - 1 if num_tokens % block_size else 0


def fork(
    pool: BlockPool, block_table: list[int], num_tokens: int, spare: list[int], num_sequences: int
) -> list[Branch | None]:
    """Distributes the blocks of `num_tokens` computed tokens to sequences, at least one.

    Takes over the caller's references on `block_table` and on `spare`, which are for copies;
    what is left of these is released. A sequence for which there is none gets None.
    """
    num_full = num_tokens // pool.block_size
    shared, partial = block_table[:num_full], block_table[num_full:]
    spare = list(spare)
    branches: list[Branch | None] = [Branch(list(block_table))]
    for _ in range(num_sequences - 1):
        if partial and not spare:
            branches.append(None)
            continue
        pool.acquire(shared + partial)
        copies = [spare.pop(0)] if partial else []
        branches.append(Branch(shared + copies, partial[0] if partial else None))
    pool.release(spare)
    return branches
