"""Any interleaving of arrivals, imports, aborts, steps and steps ahead on a tiny pool ends well.

The runner's memory remembers, for every slot, the token history that was written there. So
a block that was freed under a step, cached before it was computed, or shared wrongly shows
up as a history that is not the reader's.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.hashing import block_hashes
from engine.batch import SampledToken, ScheduledSequence, StepBatch, StepResult
from engine.block_pool import BlockPool
from engine.fork import fork, num_copies
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence
from tests.engine.builders import SCOPE, make_sequence

NUM_BLOCKS = 8
BLOCK_SIZE = 2
MAX_MODEL_LEN = NUM_BLOCKS * BLOCK_SIZE

History = tuple[int, ...]


def next_token(history: History) -> int:
    """The model: a function of the whole history, over a vocabulary of two."""
    return hash(history) % 2


def slot_of(block_table: list[int], position: int) -> int:
    return block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Memory:
    """KV without a model: each slot holds the history up to its token."""

    def __init__(self) -> None:
        self.slots: dict[int, History] = {}
        self.last: dict[Sequence, int] = {}
        """What the step before has yielded, as the runner keeps it."""

    def write(self, block_table: list[int], history: History, start: int) -> None:
        for position in range(start, len(history)):
            self.slots[slot_of(block_table, position)] = history[: position + 1]

    def check(self, block_table: list[int], history: History) -> None:
        for position in range(len(history)):
            assert self.slots.get(slot_of(block_table, position)) == history[: position + 1]

    def copy(self, source: int, destination: int) -> None:
        for offset in range(BLOCK_SIZE):
            held = self.slots.get(source * BLOCK_SIZE + offset, ())
            self.slots[destination * BLOCK_SIZE + offset] = held

    def execute(self, batch: StepBatch) -> StepResult:
        histories = [self.history_of(item) for item in batch.sequences]
        for item in batch.sequences:
            if item.copy_source is not None:
                self.copy(item.copy_source, item.block_table[item.start // BLOCK_SIZE])
        for item, history in zip(batch.sequences, histories, strict=True):
            self.write(item.block_table, history, item.start)
        for item, history in zip(batch.sequences, histories, strict=True):
            self.check(item.block_table, history)
        tokens = [
            SampledToken(next_token(history)) if item.samples else None
            for item, history in zip(batch.sequences, histories, strict=True)
        ]
        pairs = zip(batch.sequences, tokens, strict=True)
        self.last = {item.sequence: token.token_id for item, token in pairs if token is not None}
        return StepResult(tuple(tokens))

    def history_of(self, item: ScheduledSequence) -> History:
        """All tokens up to the end of the item."""
        known = tuple(item.sequence.token_slice(0, item.start + item.num_tokens))
        if not item.awaits_token:
            return known
        return (*known[: item.start], self.last[item.sequence])


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1)
stops = st.sampled_from([(), (1,)])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 10),
        partial=st.integers(1, 3),
        threshold=st.integers(1, 8),
        is_caching=st.booleans(),
    )
    def start(
        self, max_num_seqs: int, budget: int, partial: int, threshold: int, is_caching: bool
    ) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_partial_prefills=partial,
            max_long_partial_prefills=max(1, partial - 1),
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=is_caching,
        )
        self.scheduler = Scheduler(self.config, self.pool)
        self.memory = Memory()
        self.flights: list[StepBatch] = []
        self.results: list[StepResult] = []
        """Of the first flights: what was computed and is not booked yet."""
        self.added: list[Sequence] = []
        self.aborted: set[Sequence] = set()
        self.foreign: list[int] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), stops=stops)
    def add(self, prompt: list[int], max_tokens: int, stops: tuple[int, ...]) -> None:
        sequence = make_sequence(
            str(len(self.added)), prompt, max_tokens=max_tokens, stop_token_ids=stops
        )
        self.added.append(sequence)
        self.scheduler.add(sequence)

    @rule(prompt=prompts, max_tokens=st.integers(2, 8), num_choices=st.integers(1, 4))
    def add_import(self, prompt: list[int], max_tokens: int, num_choices: int) -> None:
        held = []
        if self.config.enable_prefix_caching:
            held = self.pool.match_prefix(block_hashes(prompt, BLOCK_SIZE, SCOPE))
        count = -(-len(prompt) // BLOCK_SIZE) - len(held)
        pulled = self.pool.reserve(held, count)
        if pulled is None or len(prompt) == MAX_MODEL_LEN - 1:
            self.pool.release(reversed([*held, *pulled]) if pulled is not None else ())
            return
        table = held + pulled
        spare = self.pool.allocate(num_copies(len(prompt), num_choices, BLOCK_SIZE)) or []
        branches = fork(self.pool, table, len(prompt), spare, num_choices)
        for choice, branch in enumerate(branches):
            sequence = make_sequence(
                str(len(self.added)), prompt, outputs=[choice % 2], max_tokens=max_tokens
            )
            self.added.append(sequence)
            if branch is None:
                sequence.num_preemptions = 1
                self.scheduler.add(sequence)
                continue
            sequence.block_table = branch.block_table
            sequence.copy_source = branch.copy_source
            sequence.num_computed_tokens = len(prompt)
            if choice == 0:
                self.memory.write(table, tuple(prompt), len(held) * BLOCK_SIZE)
                self.memory.check(table, tuple(prompt))
            self.scheduler.add_computed(sequence)

    @rule()
    def begin_step(self) -> None:
        if not self.flights:
            self.note(self.scheduler.schedule())

    @rule()
    def begin_step_ahead(self) -> None:
        if len(self.flights) == 1:
            self.note(self.scheduler.schedule_ahead())

    def note(self, batch: StepBatch | None) -> None:
        if batch is not None:
            self.flights.append(batch)
            self.check_limits(batch)

    @rule()
    def compute(self) -> None:
        if len(self.results) < len(self.flights):
            self.results.append(self.memory.execute(self.flights[len(self.results)]))

    @rule()
    def end_step(self) -> None:
        if not self.flights:
            return
        if not self.results:
            self.compute()
        batch = self.flights.pop(0)
        alive = [item.sequence for item in batch.sequences if not item.sequence.is_finished]
        updates = self.scheduler.postprocess(batch, self.results.pop(0))
        assert [update.sequence for update in updates] == alive

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.added:
            sequence = data.draw(st.sampled_from(self.added))
            was_finished = sequence.is_finished
            assert (self.scheduler.abort(sequence.key) is None) == was_finished
            if not was_finished:
                self.aborted.add(sequence)

    @rule(count=st.integers(1, NUM_BLOCKS))
    def take_blocks_for_something_else(self, count: int) -> None:
        blocks = self.pool.allocate(count) or []
        for block_id in blocks:
            for slot in range(block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE):
                self.memory.slots[slot] = ()
        self.foreign += blocks

    @rule()
    def give_them_back(self) -> None:
        self.pool.release(self.foreign)
        self.foreign = []

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if held := self.pool.held_hashes():
            self.pool.drop(data.draw(st.sampled_from(held)))

    def check_limits(self, batch: StepBatch) -> None:
        config = self.config
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert len(batch.sequences) <= config.max_num_seqs
        partial = [item for item in batch.sequences if not item.samples]
        assert len(partial) <= config.max_num_partial_prefills
        num_long = sum(
            item.sequence.num_tokens - item.start > config.long_prefill_token_threshold
            for item in batch.sequences
        )
        assert num_long <= config.max_long_partial_prefills

    @invariant()
    def the_audit_is_clean(self) -> None:
        if hasattr(self, "scheduler"):
            assert self.scheduler.audit() == []

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.give_them_back()
        num_steps = 0
        while self.scheduler.has_work or self.flights:
            self.end_step()
            self.begin_step()
            self.begin_step_ahead()
            assert self.flights or not self.scheduler.has_work, "nothing can run"
            assert self.scheduler.audit() == []
            num_steps += 1
            assert num_steps < 1000, "no end in sight"
        assert self.pool.stats().referenced == 0
        for sequence in self.added:
            self.check_outcome(sequence)

    def check_outcome(self, sequence: Sequence) -> None:
        assert sequence.is_finished and sequence.block_table == []
        num_prior = sequence.num_prior_outputs
        history = (*sequence.prompt_token_ids, *sequence.output_token_ids[:num_prior])
        for token_id in sequence.output_token_ids[num_prior:]:
            assert token_id == next_token(history)
            history += (token_id,)
        if sequence not in self.aborted:
            room = MAX_MODEL_LEN - len(sequence.prompt_token_ids)
            most = min(sequence.sampling.max_tokens, room)
            outputs = sequence.output_token_ids
            is_stopped = outputs[-1] in sequence.sampling.stop_token_ids
            assert len(outputs) == most or (is_stopped and len(outputs) < most)
            assert not any(token in sequence.sampling.stop_token_ids for token in outputs[:-1])


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=50)
