"""The tree of block hashes that the pool holds: which block stands for which token history.

Each hash's parent is the hash of the block before it. A child is held only while its parent
is, so what is held is *prefix-closed*: of any chain of hashes the held ones come first. That
is what lets a lookup bisect instead of probing every hash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class PrefixTree:
    """Hashes and the blocks that hold them. Knows nothing of references or eviction."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._parent_of: dict[int, int] = {}
        self._children_of: dict[int, set[int]] = {}
        self._events: dict[bytes, bool] = {}
        # Blocks that were of use again, the latest last. What is found is a whole prefix, and
        # its end is noted first: so a parent always stands behind its children.
        self._found: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def match_length(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes of a chain are held; O(log n) lookups."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._block_of)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest held prefix of a chain, or of any hashes at all."""
        blocks: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def insert(self, block_id: int, block_hash: bytes, parent_hash: bytes | None) -> None:
        """Adds `block_id` below its parent (None: at the root).

        Changes nothing when another block holds the hash already, or when the parent is not
        held: a child without its parent would break the prefix-closed property.
        """
        if block_hash in self._block_of:
            return
        assert block_id not in self._hash_of, f"block {block_id} holds another hash"
        if parent_hash is not None:
            parent = self._block_of.get(parent_hash)
            if parent is None:
                return
            self._parent_of[block_id] = parent
            self._children_of.setdefault(parent, set()).add(block_id)
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        self._note(block_hash, is_held=True)

    def has_children(self, block_id: int) -> bool:
        return block_id in self._children_of

    def remove(self, block_id: int) -> int | None:
        """Forgets a leaf. Returns its parent if that has become a leaf by this."""
        assert block_id not in self._children_of, f"block {block_id} is not a leaf"
        block_hash = self._hash_of.pop(block_id)
        self._found.pop(block_id, None)
        del self._block_of[block_hash]
        self._note(block_hash, is_held=False)
        parent = self._parent_of.pop(block_id, None)
        if parent is None:
            return None
        siblings = self._children_of[parent]
        siblings.remove(block_id)
        if siblings:
            return None
        del self._children_of[parent]
        return parent

    def subtree(self, block_hash: bytes) -> list[int]:
        """The block of `block_hash` and of all its descendants, children before parents."""
        root = self._block_of.get(block_hash)
        if root is None:
            return []
        found = [root]
        for block_id in found:
            found.extend(sorted(self._children_of.get(block_id, ())))
        return found[::-1]

    def hash_of(self, block_id: int) -> bytes:
        return self._hash_of[block_id]

    def note_found(self, block_ids: Sequence[int]) -> None:
        """These blocks, from `match`, are used again."""
        for block_id in reversed(block_ids):
            self._found[block_id] = None
            self._found.move_to_end(block_id)

    def hottest(self, limit: int) -> tuple[list[bytes], list[int]]:
        """Hashes of up to `limit` blocks that were found again, the latest first.

        With them, for each the place of its parent among them, -1 for a first block: parents
        stand before their children.
        """
        block_ids = list(islice(reversed(self._found), limit))
        places = {block_id: place for place, block_id in enumerate(block_ids)}
        parents = [self._parent_of.get(block_id) for block_id in block_ids]
        return (
            [self._hash_of[block_id] for block_id in block_ids],
            [-1 if parent is None else places[parent] for parent in parents],
        )

    def hashes(self) -> list[bytes]:
        """Everything held, parents first: a dict keeps the order in which they came."""
        return list(self._block_of)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) since the last call; each hash stands in one of them at most.

        Only what became of a hash last is kept, so the order in which a reader applies the
        two lists does not matter. `stored` has parents before children.
        """
        stored = [block_hash for block_hash, is_held in self._events.items() if is_held]
        removed = [block_hash for block_hash, is_held in self._events.items() if not is_held]
        self._events = {}
        return stored, removed

    def _note(self, block_hash: bytes, *, is_held: bool) -> None:
        self._events.pop(block_hash, None)
        self._events[block_hash] = is_held

    def audit(self) -> list[str]:
        """One line for each inconsistency between the maps."""
        errors = []
        if {block: block_hash for block_hash, block in self._block_of.items()} != self._hash_of:
            errors.append("hashes and blocks do not map to each other")
        links = {(child, parent) for child, parent in self._parent_of.items()}
        if links != {(c, parent) for parent, cs in self._children_of.items() for c in cs}:
            errors.append("parents and children do not map to each other")
        for child, parent in links:
            if child not in self._hash_of or parent not in self._hash_of:
                errors.append(f"block {child}: its parent, block {parent}, is not held")
        for block_id in self._found:
            above = self._parent_of.get(block_id)
            if block_id not in self._hash_of or not (above is None or above in self._found):
                errors.append(f"block {block_id}: counts as found, but not as part of a prefix")
        if not all(self._children_of.values()):
            errors.append("a leaf is listed among the parents")
        return errors
