"""Any order of operations on the pool keeps its invariants and a true event stream."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from core.hashing import block_hashes
from engine.block_pool import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Owners hold chains of blocks; a prefix index follows the events."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 1)
        self.owned: list[tuple[list[int], list[bytes]]] = []
        self.quarantined: list[int] = []
        self.index: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def reserve(self, tokens: list[int]) -> None:
        hashes = block_hashes(tokens, 1, b"scope")
        held = self.pool.match_prefix(hashes)
        assert len(held) == sum(h in self.pool.held_hashes() for h in hashes)
        before = self.pool.stats()
        new = self.pool.reserve(held, len(tokens) - len(held))
        if new is None:
            assert self.pool.stats() == before
            return
        assert not {b for blocks, _ in self.owned for b in blocks} & set(new)
        assert not set(self.quarantined) & set(new)
        self.owned.append((held + new, hashes))

    @rule(data=st.data())
    def cache_one_block(self, data: st.DataObject) -> None:
        if self.owned:
            blocks, hashes = data.draw(st.sampled_from(self.owned))
            index = data.draw(st.integers(0, len(hashes) - 1))
            # A table's block keeps the hash that it got.
            parent = hashes[index - 1] if index else None
            self.pool.cache(blocks[index], hashes[index], parent)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            owner = data.draw(st.integers(0, len(self.owned) - 1))
            blocks, _ = self.owned.pop(owner)
            self.pool.release(blocks if data.draw(st.booleans()) else reversed(blocks))

    @rule(data=st.data())
    def give_a_read_up(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 3))
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.pool.quarantine(blocks)
            self.quarantined += blocks

    @rule()
    def settle(self) -> None:
        self.pool.settle(self.quarantined)
        self.quarantined = []

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if held := self.pool.held_hashes():
            self.pool.drop(data.draw(st.sampled_from(held)))

    @rule()
    def publish(self) -> None:
        stored, removed = self.pool.drain_events()
        self.index = (self.index | set(stored)) - set(removed)
        assert self.index == set(self.pool.held_hashes())

    @rule()
    def everything_not_in_use_can_be_allocated(self) -> None:
        in_use = {b for blocks, _ in self.owned for b in blocks} | set(self.quarantined)
        assert self.pool.num_available == NUM_BLOCKS - len(in_use)
        blocks = self.pool.allocate(self.pool.num_available)
        assert blocks is not None and not in_use & set(blocks)
        self.pool.release(blocks)

    @invariant()
    def the_audit_is_clean(self) -> None:
        assert self.pool.audit() == []
        for block_id in range(NUM_BLOCKS):
            num_owners = sum(block_id in blocks for blocks, _ in self.owned)
            assert self.pool.num_references(block_id) == num_owners

    def teardown(self) -> None:
        for blocks, _ in self.owned:
            self.pool.release(reversed(blocks))
        self.pool.settle(self.quarantined)
        assert self.pool.stats().referenced == self.pool.stats().quarantined == 0
        assert self.pool.num_available == NUM_BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
