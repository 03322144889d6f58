"""The hand-off's state machines against a channel and workers that do their worst.

Real export and import tables over real block pools; messages are lost, reordered and
repeated, workers crash and come back, clocks jump, requests are aborted and tried again at
any moment, and a read samples and writes each of its blocks whenever it likes.

What must hold: no block is given out while a read may land in it; nobody decodes on KV that
is not his prompt's; a lease is never said to have held when it had not; every block comes
back; every request has an outcome in bounded time; what is repeated, stale or unknown
changes nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.kvtransfer.hand_off.cluster import DECODES, PREFILLS, WORKERS, Cluster
from tests.kvtransfer.hand_off.world import NUM_LAYERS, Prompt

PROMPTS = [
    Prompt("a"),
    Prompt("ab", is_last_full=False),
    Prompt("abc"),
    Prompt("abd", is_last_full=False),
    Prompt("efg", is_last_full=False),
    Prompt("efgh"),
    Prompt("ij", ends_at_first_token=True),
]
NUM_EXAMPLES, NUM_STEPS = 560, 60
WORTH_SEEING = (
    "announced in parts",
    "committed",
    "crash",
    "export expired",
    "given up in a read",
    "import expired",
    "lease held",
    "lease lost",
    "renewed",
    "repeated announcement",
    "settled",
    "stale message",
    "stale release",
    "told again",
)

SEEN: Counter[str] = Counter()
"""What the examples of one run went through."""

Item = TypeVar("Item")
indices = st.integers(0, 31)


def pick(items: Sequence[Item], index: int) -> Item:
    return items[index % len(items)]


class HandOffMachine(RuleBasedStateMachine):
    @initialize(
        num_parallel=st.integers(1, 3),
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4),
        choices=st.lists(indices, max_size=40),
    )
    def start(self, num_parallel: int, prompts: list[Prompt], choices: list[int]) -> None:
        self.cluster = Cluster(PROMPTS, num_parallel)
        self.world = self.cluster.world
        for index, prompt in enumerate(prompts):
            self.submit(prompt, pick(PREFILLS, index), pick(DECODES, index // 2))
        self.cluster.go_well(choices)

    # The router

    @rule(
        prompt=st.sampled_from(PROMPTS),
        prefill=st.sampled_from(PREFILLS),
        decode=st.sampled_from(DECODES),
    )
    def submit(self, prompt: Prompt, prefill: str, decode: str) -> None:
        self.cluster.submit(prompt, prefill, decode)

    @precondition(lambda self: self.cluster.dispatches)
    @rule(index=indices, prefill=st.sampled_from(PREFILLS), decode=st.sampled_from(DECODES))
    def try_again(self, index: int, prefill: str, decode: str) -> None:
        self.cluster.try_again(pick(self.cluster.dispatches, index), prefill, decode)

    # All sides

    @precondition(lambda self: self.cluster.natural_actions())
    @rule(choices=st.lists(indices, min_size=16, max_size=40))
    def go_well(self, choices: list[int]) -> None:
        self.cluster.go_well(choices)

    @precondition(lambda self: self.cluster.natural_actions())
    @rule(choices=st.lists(indices, min_size=1, max_size=4))
    def go_well_for_a_moment(self, choices: list[int]) -> None:
        self.cluster.go_well(choices)

    @rule(
        kind=st.sampled_from(["lose", "break call", "break read", "damage", "abort"]), index=indices
    )
    def go_wrong(self, kind: str, index: int) -> None:
        if kind == "lose" and self.world.messages:
            self.world.messages.remove(pick(self.world.messages, index))
        elif kind == "break call" and self.world.calls:
            self.cluster.break_call(index % len(self.world.calls))
        elif kind == "break read" and self.cluster.reads:
            life, read = pick(self.cluster.reads, index)
            if not read.is_given_up:
                life.fail(read.key)
        elif kind == "damage" and self.cluster.reads:
            life, read = pick(self.cluster.reads, index)
            if not read.is_given_up:
                life.report_damage(read.key)
        elif kind == "abort" and self.cluster.dispatches:
            self.cluster.abort(pick(self.cluster.dispatches, index))

    @precondition(lambda self: self.world.calls)
    @rule(name=st.sampled_from(WORKERS))
    def cut_off(self, name: str) -> None:
        self.cluster.cut_off(name)

    @rule(name=st.sampled_from(WORKERS), index=indices)
    def give_up(self, name: str, index: int) -> None:
        """One worker cancels a request for reasons of its own."""
        life = self.world.lives[name]
        if life.keys():
            life.cancel(pick(life.keys(), index))

    @rule(name=st.sampled_from(WORKERS), is_replayed=st.booleans(), chance=st.integers(0, 3))
    def crash(self, name: str, is_replayed: bool, chance: int) -> None:
        if chance == 0:
            self.cluster.crash(name)
            if is_replayed:
                self.cluster.replay(name)

    @precondition(lambda self: any(life.committed for life in self.cluster.decodes))
    @rule(index=indices)
    def crash_after_commit(self, index: int) -> None:
        """And everything that led to the commit is heard again by the next life."""
        lives = [life for life in self.cluster.decodes if life.committed]
        name = pick(lives, index).address.name
        self.cluster.crash(name)
        self.cluster.replay(name)

    # The channel

    @precondition(lambda self: self.world.messages)
    @rule(index=indices)
    def deliver(self, index: int) -> None:
        self.cluster.deliver(pick(self.world.messages, index))

    @precondition(lambda self: self.world.delivered)
    @rule(index=indices)
    def repeat(self, index: int) -> None:
        self.cluster.repeat(pick(self.world.delivered[::-1], index))

    @precondition(lambda self: self.world.delivered)
    @rule(name=st.sampled_from(WORKERS))
    def replay(self, name: str) -> None:
        self.cluster.replay(name)

    @precondition(lambda self: any(life.committed for life in self.cluster.decodes))
    @rule(index=indices, seconds=st.sampled_from([0.0, 3.0, 9.0]))
    def replay_after_commit(self, index: int, seconds: float) -> None:
        lives = [life for life in self.cluster.decodes if life.committed]
        self.world.advance(seconds)
        self.cluster.replay(pick(lives, index).address.name)

    # Engines and transports

    @precondition(lambda self: self.cluster.computations())
    @rule(index=indices, num_layers=st.integers(1, NUM_LAYERS))
    def compute(self, index: int, num_layers: int) -> None:
        pick(self.cluster.computations(num_layers), index)()

    @precondition(lambda self: self.cluster.reads)
    @rule(index=indices, block=indices)
    def sample(self, index: int, block: int) -> None:
        life, read = pick(self.cluster.reads, index)
        life.sample(read, pick(read.copies, block))

    @precondition(lambda self: self.cluster.reads)
    @rule(index=indices, block=indices)
    def land(self, index: int, block: int) -> None:
        life, read = pick(self.cluster.reads, index)
        life.land(read, pick(read.copies, block))

    @precondition(lambda self: self.cluster.reads)
    @rule(index=indices)
    def end_read(self, index: int) -> None:
        life, read = pick(self.cluster.reads, index)
        life.end_read(read)

    @precondition(lambda self: any(life.committed for life in self.cluster.decodes))
    @rule(index=indices, is_last=st.booleans())
    def decode(self, index: int, is_last: bool) -> None:
        committed = [(life, r) for life in self.cluster.decodes for r in life.committed]
        life, request = pick(committed, index)
        if is_last:
            life.finish(request)
        else:
            life.grow(request)

    @rule(name=st.sampled_from(WORKERS), count=st.integers(0, 4))
    def other_work(self, name: str, count: int) -> None:
        if count > 0:
            self.world.lives[name].occupy(count)
        else:
            self.world.lives[name].vacate()

    # Time

    @rule(seconds=st.sampled_from([0.5, 0.5, 3.0, 3.0, 9.0, 31.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.cluster.reads)
    @rule(seconds=st.integers(1, 9), is_renewing=st.booleans())
    def stall(self, seconds: int, is_renewing: bool) -> None:
        self.cluster.stall(seconds, is_renewing)

    @rule(name=st.sampled_from(WORKERS))
    def reap(self, name: str) -> None:
        self.world.lives[name].reap()

    # What must hold

    @invariant()
    def all_is_well(self) -> None:
        SEEN["steps"] += 1
        if hasattr(self, "cluster"):
            self.cluster.make_room()
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check_end()
            SEEN.update(self.world.seen)


@pytest.mark.timeout(900)
def test_nothing_breaks_the_hand_off() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        HandOffMachine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SEEN["steps"] >= 20_000
    rare = {name: SEEN[name] for name in WORTH_SEEING if SEEN[name] < 10}
    assert not rare, "the machine hardly gets there any more"


def test_without_a_fault_every_request_is_committed() -> None:
    cluster = Cluster(PROMPTS, num_parallel=1)
    choices = itertools.count()
    for index in range(40):
        cluster.submit(pick(PROMPTS, index), pick(PREFILLS, index), pick(DECODES, index // 2))
        # The router tells decode first.
        cluster.deliver(cluster.world.messages[0])
        while cluster.natural_actions():
            cluster.go_well([next(choices)])
        for life in cluster.decodes:
            for request in life.committed:
                life.finish(request)
        cluster.check()
    outcomes = [life.outcomes.get(d.key) for d in cluster.dispatches for life in cluster.prefills]
    assert outcomes.count("finished") == 40
    num_short = sum(d.prompt.ends_at_first_token for d in cluster.dispatches)
    assert cluster.world.seen["committed"] == 40 - num_short
    cluster.check_end()
