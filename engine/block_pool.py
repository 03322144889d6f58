"""The pool of KV blocks: who may write to which block, and what may be reused.

A block is in exactly one state:

    free → referenced(n) → cached (nobody's, kept for reuse) → referenced again, or evicted → free
                         → free, when it carries no hash
                         → quarantined (a read that was given up may still land in it) → free

The pool deals in block ids and hashes only. It belongs to the event loop thread; the
scheduler, the exports and the imports of one worker share it, each releasing what it took.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.prefix_tree import PrefixTree


@dataclass(frozen=True)
class BlockStats:
    """Blocks by state; the four states sum to `total`."""

    total: int
    free: int
    cached: int
    referenced: int
    quarantined: int


class BlockPool:
    """Blocks 0 to `num_blocks - 1`, of `block_size` tokens each.

    A cached block is evicted when its room is needed, least recently released first and
    leaves of the prefix tree before their parents. `release` in reverse order of the block
    table makes a chain's tail the least recent. Every operation takes O(1) per block,
    amortised. Misuse (releasing what nobody holds) is a broken invariant and asserts.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tree = PrefixTree()
        self._num_references = [0] * num_blocks
        self._num_referenced = 0
        self._free = deque(range(num_blocks))
        self._quarantined: set[int] = set()
        # Cached blocks, least recently released first. A block that eviction met while it
        # had children waits in `_passed_over`; it is older than all that is left in `_lru`,
        # so once it is a leaf it returns to the front.
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._passed_over: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._lru) + len(self._passed_over)

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def match_length(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes of a chain are held; much cheaper than `match_prefix`."""
        return self._tree.match_length(hashes)

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest held prefix of a chain of hashes. Takes no reference."""
        return self._tree.match(hashes)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Takes one reference more on each; a cached block is revived by its first."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                self._remove_cached(block_id)
                self._num_referenced += 1
            self._num_references[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting as needed.

        None when there is no room; then nothing has changed.
        """
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict()
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        self._num_referenced += count
        return block_ids

    def reserve(self, held: Sequence[int], count: int, spare: int = 0) -> list[int] | None:
        """Acquires `held` (from `match_prefix`) and allocates `count` more, or neither.

        None when fewer than `spare` blocks would stay available; then nothing has changed.
        Returns the new blocks.
        """
        num_revived = sum(self._num_references[block_id] == 0 for block_id in held)
        if self.num_available - num_revived < count + spare:
            return None
        self.acquire(held)
        self._tree.note_found(held)
        block_ids = self.allocate(count)
        assert block_ids is not None
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Gives one reference of each back.

        At none left a block with a hash becomes cached, another one free. Pass a block
        table reversed, so that the tail of the chain is evicted first.
        """
        for block_id in block_ids:
            assert self._num_references[block_id] > 0, f"block {block_id} is not referenced"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] > 0:
                continue
            self._num_referenced -= 1
            if block_id in self._tree:
                self._lru[block_id] = None
            else:
                self._free.append(block_id)

    def cache(self, block_id: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Makes a referenced block, full and final, findable under its hash.

        `parent_hash` is the hash of the block before it, None for a first block. A no-op
        when a block holds this hash already, or when the parent is not held any more.
        """
        assert self._num_references[block_id] > 0, f"block {block_id} is not referenced"
        self._tree.insert(block_id, block_hash, parent_hash)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Turns the only reference of each into a ban on any use, until `settle`."""
        for block_id in block_ids:
            assert self._num_references[block_id] == 1, f"block {block_id} is not held once"
            assert block_id not in self._tree, f"block {block_id} has a hash"
            self._num_references[block_id] = 0
            self._num_referenced -= 1
            self._quarantined.add(block_id)

    def settle(self, block_ids: Iterable[int]) -> None:
        """Frees quarantined blocks: nothing can land in them any more."""
        for block_id in block_ids:
            self._quarantined.remove(block_id)
            self._free.append(block_id)

    def drop(self, block_hash: bytes) -> None:
        """Forgets a hash and all that descend from it; a no-op for a hash that is not held.

        Cached blocks among them become free, referenced ones stay with their owners, who
        are the caller's to deal with.
        """
        for block_id in self._tree.subtree(block_hash):
            self._forget(block_id)
            if self._num_references[block_id] == 0:
                self._remove_cached(block_id)
                self._free.append(block_id)

    def drop_blocks(self, block_ids: Iterable[int]) -> None:
        """Forgets whatever hashes these blocks hold, with all that descend from them."""
        for block_id in block_ids:
            if block_id in self._tree:
                self.drop(self._tree.hash_of(block_id))

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) hashes since the last call, for the prefix index.

        A hash stands in one of the two at most: where it ended. `stored` has parents first.
        """
        return self._tree.drain_events()

    def hottest(self, limit: int) -> tuple[list[bytes], list[int]]:
        """Hashes of up to `limit` blocks that `reserve` was given, the latest first, and for
        each the place of its parent among them (see PrefixTree.hottest)."""
        return self._tree.hottest(limit)

    def held_hashes(self) -> list[bytes]:
        """Every hash held, parents first."""
        return self._tree.hashes()

    def stats(self) -> BlockStats:
        return BlockStats(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._lru) + len(self._passed_over),
            referenced=self._num_referenced,
            quarantined=len(self._quarantined),
        )

    def audit(self) -> list[str]:
        """One line for each broken invariant; empty when all hold. O(num_blocks)."""
        errors = self._tree.audit()
        states = [*self._free, *self._lru, *self._passed_over, *self._quarantined]
        states += [block_id for block_id, n in enumerate(self._num_references) if n > 0]
        if sorted(states) != list(range(self.num_blocks)):
            errors.append("the states free, cached, referenced, quarantined do not partition")
        if sum(n > 0 for n in self._num_references) != self._num_referenced:
            errors.append(f"{self._num_referenced} is not the number of referenced blocks")
        for block_id in (*self._lru, *self._passed_over):
            if block_id not in self._tree:
                errors.append(f"block {block_id}: cached without a hash")
        for block_id in (*self._free, *self._quarantined):
            if block_id in self._tree:
                errors.append(f"block {block_id}: has a hash though its content is not kept")
        for block_id in self._passed_over:
            if not self._tree.has_children(block_id):
                errors.append(f"block {block_id}: a leaf that eviction does not see")
        return errors

    def _evict(self) -> None:
        """Frees at least one cached block."""
        while self._lru:
            block_id, _ = self._lru.popitem(last=False)
            if not self._tree.has_children(block_id):
                self._forget(block_id)
                self._free.append(block_id)
                return
            self._passed_over[block_id] = None
        # Every cached block has a referenced descendant. That happens when two sequences
        # compute the same blocks and only one copy got the hash: the other's next block
        # then hangs below a block that it does not reference. The descendants lose their
        # hashes, so that a cached block is always room.
        self.drop(self._tree.hash_of(next(iter(self._passed_over))))

    def _forget(self, block_id: int) -> None:
        new_leaf = self._tree.remove(block_id)
        if new_leaf is not None and new_leaf in self._passed_over:
            del self._passed_over[new_leaf]
            self._lru[new_leaf] = None
            self._lru.move_to_end(new_leaf, last=False)

    def _remove_cached(self, block_id: int) -> None:
        if block_id in self._lru:
            del self._lru[block_id]
        else:
            assert block_id in self._passed_over, f"block {block_id} is not cached"
            del self._passed_over[block_id]
