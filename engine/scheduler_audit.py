"""The invariants between sequences and the block pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.block_pool import BlockPool
from engine.sequence import Sequence


def audit_sequences(sequences: Collection[Sequence], pool: BlockPool) -> list[str]:
    """One line for each broken rule; empty when all hold.

    Every block of a table is referenced at least as often as it stands in tables, and two
    sequences share a block only where they share the history of tokens that it stands for.
    """
    errors = []
    copy_sources = Counter(s.copy_source for s in sequences if s.copy_source is not None)
    owners: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence in sequences:
        if len(set(sequence.block_table)) != len(sequence.block_table):
            errors.append(f"{sequence.key}: a block stands twice in its table")
        if len(sequence.block_table) * pool.block_size < sequence.num_computed_tokens:
            errors.append(f"{sequence.key}: computed tokens have no block")
        for index, block_id in enumerate(sequence.block_table):
            owners.setdefault(block_id, []).append((sequence, index))
    for block_id in owners.keys() | copy_sources.keys():
        places = owners.get(block_id, [])
        num_references = pool.num_references(block_id)
        num_owners = len(places) + copy_sources[block_id]
        if num_references < num_owners:
            errors.append(
                f"block {block_id}: belongs to {num_owners} sequences "
                f"and is referenced {num_references} times"
            )
        if len(places) > 1 and len({_history(*place, pool.block_size) for place in places}) > 1:
            errors.append(f"block {block_id}: shared by sequences of different tokens")
    return errors


def _history(sequence: Sequence, index: int, block_size: int) -> object:
    """What the block at `index` stands for; unique to the sequence while it is not full."""
    end = (index + 1) * block_size
    if end > sequence.num_computed_tokens:
        return sequence.key
    if index < len(sequence.block_hashes):
        return sequence.block_hashes[index]
    return (sequence.scope, *sequence.token_slice(0, end))
