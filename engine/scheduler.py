"""Which tokens the next step computes: iteration-level scheduling over one block pool.

    schedule() -> StepBatch -> ModelRunner.execute() -> StepResult -> postprocess()

Pure bookkeeping on the event loop thread: no tensors, no clock, no I/O. Between `schedule` and
`postprocess` sequences may be added and aborted, but no block of the step's sequences is freed.
A second step may be planned meanwhile, `schedule_ahead`: see `engine.flights`.
(Iteration-level scheduling: Orca, Yu et al., OSDI 2022, section 3.1.)

Why it never deadlocks. Admission allocates blocks for every token known of a sequence, so one
that is being prefilled needs no more room until it decodes, and is never preempted. Only a
decoding sequence asks for room, and it can always preempt itself. Each admission ends in at
least one new token, and a sequence that runs alone may use the whole pool, which holds
`max_model_len` tokens: so every sequence ends, given that blocks taken by others (exports,
imports) come back.
"""

from __future__ import annotations

from bisect import insort
from itertools import chain

from core.errors import StartupError
from engine.batch import ScheduledSequence, SequenceUpdate, StepBatch, StepResult
from engine.block_pool import BlockPool
from engine.finish import ends_with_next, finish_reason
from engine.flights import Flights
from engine.prefill_plan import PrefillPlan, num_remaining
from engine.prefix_cache import PrefixCache
from engine.scheduler_audit import audit_sequences
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence, SequenceKey, SequenceStatus
from engine.waiting_queue import WaitingQueue

_MAX_WATERMARK_SHARE = 0.05
"""Most of the pool that admissions leave free for running decodes to grow into."""


class Scheduler:
    """Sequences of one engine, from `add` to their finish.

    A sequence waits (`_waiting`, holding no block), is ready (`_ready`: it came with its
    blocks and waits for a place in the batch), or runs
    (`_running`, in order of arrival). Its blocks' references belong to it and are released
    here when it finishes, is aborted or preempted; its block table is empty afterwards, so
    whoever needs the blocks longer takes references of their own before.

    Raises StartupError when the pool cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._cache = PrefixCache(pool, is_enabled=config.enable_prefix_caching)
        num_blocks = self._num_blocks_for(config.max_model_len)
        if num_blocks > pool.num_blocks:
            raise StartupError(
                f"max_model_len {config.max_model_len} needs {num_blocks} KV blocks "
                f"and the pool has {pool.num_blocks}"
            )
        self._max_watermark = max(1, int(pool.num_blocks * _MAX_WATERMARK_SHARE))
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._waiting = WaitingQueue()
        self._ready: dict[SequenceKey, Sequence] = {}
        self._running: list[Sequence] = []
        self._num_arrivals = 0
        self._preempted: list[Sequence] = []
        self._flights = Flights(pool)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is known, even if none can be computed now."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences outside the batch: new, preempted, and ready ones."""
        return len(self._waiting) + len(self._ready)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preempted(self) -> int:
        """Preempted sequences that wait to be recomputed."""
        return self._waiting.num_preempted

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be prefilled, of waiting sequences and of those in the batch."""
        counts = (s.num_tokens - s.num_computed_tokens for s in self._running)
        waiting = sum(sequence.num_tokens for sequence in self._waiting)
        return waiting + sum(count for count in counts if count > 1)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence without KV; it has between 1 and `max_model_len` tokens.

        One that counts as preempted goes before all that have never run.
        """
        assert not sequence.block_table and sequence.num_computed_tokens == 0
        self._register(sequence)
        if sequence.num_preemptions:
            self._waiting.add_preempted(sequence)
        else:
            self._waiting.add(sequence)

    def add_computed(self, sequence: Sequence) -> None:
        """Takes over a sequence whose KV, but for the newest token's, stands in its blocks.

        The references of `block_table` and `copy_source` become the sequence's. Its full blocks
        enter the prefix cache now. It joins the batch as soon as there is a place, before any
        waiting sequence.
        """
        assert sequence.num_computed_tokens == sequence.num_tokens - 1
        assert len(sequence.block_table) >= self._num_blocks_for(sequence.num_computed_tokens)
        self._register(sequence)
        self._cache.store(sequence, first=0)
        self._ready[sequence.key] = sequence
        self._promote_ready()

    def add_allocated(self, sequence: Sequence) -> None:
        """Takes over a sequence that has blocks for all its known tokens.

        The references of `block_table` become the sequence's. The first of its blocks, full
        of `num_computed_tokens`, come from the prefix cache; the rest is computed as soon as
        there is a place in the batch, before any waiting sequence.
        """
        assert sequence.num_computed_tokens < sequence.num_tokens
        assert len(sequence.block_table) == self._num_blocks_for(sequence.num_tokens)
        self._register(sequence)
        sequence.num_cached_tokens = sequence.num_computed_tokens
        self._ready[sequence.key] = sequence
        self._promote_ready()

    def abort(self, key: SequenceKey) -> Sequence | None:
        """Ends a sequence without a reason to finish; None when it is not known (any more).

        Its blocks are freed at once, or when the steps on the device are over if it is in
        one of them. No update reports it.
        """
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def schedule(self) -> StepBatch | None:
        """The next step, or None when nothing can be computed now.

        With `has_work`, None means that blocks are missing which no running sequence holds;
        ask again when an export or import has released some. Decodes come first, so none is
        stalled; then prefills begun before; then admissions.
        """
        assert not self._flights, "a step is on the device"
        self._promote_ready()
        num_preempted = self.num_preempted
        decodes = self._schedule_decodes([s for s in self._running if _is_decoding(s)])
        # Room that a preemption has just made is for those who run.
        may_admit = not self._running or self.num_preempted == num_preempted
        items = decodes + self._schedule_prefills(len(decodes), may_admit)
        if not items:
            # All that ran may have been preempted, so that there are places now.
            return self.schedule() if self._ready else None
        return self._flights.begin(items)

    def schedule_ahead(self) -> StepBatch | None:
        """The step after the one on the device; None when that one's result is needed first.

        A sequence awaits its token when all its known ones are computed or on the device.
        """
        assert len(self._flights) == 1, "one step is on the device"
        self._promote_ready()
        awaiting = [s for s in self._running if num_remaining(s) == 0]
        ending = {s for s in awaiting if ends_with_next(s, self._config.max_model_len)}
        going_on = [s for s in awaiting if s not in ending]
        if not going_on or any(s.sampling.has_penalties for s in going_on):
            return None
        decodes = [s for s in self._running if _is_decoding(s) and s not in ending]
        if sum(self._needs_block(s) for s in decodes) > self._pool.num_available:
            return None
        items = self._schedule_decodes(decodes)
        return self._flights.begin(items + self._schedule_prefills(len(items), may_admit=True))

    def _prefill_budget(self, num_decodes: int) -> int:
        budget = self._config.max_num_batched_tokens - num_decodes
        beside = self._config.max_prefill_tokens_beside_decodes
        return budget if beside is None or num_decodes == 0 else min(budget, beside)

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call that still wait, in order of arrival.

        They are computed again in their turn, unless the caller aborts them.
        """
        preempted, self._preempted = self._preempted, []
        return sorted((s for s in preempted if s in self._waiting), key=_arrival)

    def postprocess(self, batch: StepBatch, result: StepResult) -> list[SequenceUpdate]:
        """Books what the oldest step on the device computed: one update for each sequence that
        has not ended meanwhile.

        An update without a token says that a chunk inside the known tokens is done.
        """
        assert len(result.tokens) == len(batch.sequences)
        self._flights.end(batch)
        updates = []
        for index, (item, token) in enumerate(zip(batch.sequences, result.tokens, strict=True)):
            sequence = item.sequence
            if sequence.is_finished:
                continue
            self._drop_copy_source(sequence)
            sequence.num_computed_tokens = item.start + item.num_tokens
            self._cache.store(sequence, first=item.start // self._pool.block_size)
            output_index = len(sequence.output_token_ids)
            if item.samples:
                assert token is not None, "a sequence that samples got no token"
                sequence.output_token_ids.append(token.token_id)
                sequence.finish_reason = finish_reason(sequence, self._config.max_model_len)
            if sequence.finish_reason is not None:
                self._remove(sequence)
            updates.append(
                SequenceUpdate(
                    sequence,
                    token,
                    output_index,
                    sequence.finish_reason,
                    result.siblings.get(index, ()),
                    result.prompt_logprobs.get(index, ()),
                )
            )
        return updates

    def audit(self) -> list[str]:
        """One line for each broken invariant of the pool and the sequences; empty when fine."""
        errors = self._pool.audit() + audit_sequences(self._sequences.values(), self._pool)
        places = [*self._waiting, *self._ready.values(), *self._running]
        if sorted(s.key for s in places) != sorted(self._sequences):
            errors.append("the sequences known are not those waiting, ready and running")
        if len(self._running) > self._config.max_num_seqs:
            errors.append(f"{len(self._running)} sequences run")
        for sequence in self._running:
            if sequence.status is not SequenceStatus.RUNNING:
                errors.append(f"{sequence.key}: runs with status {sequence.status.value}")
        for sequence in self._waiting:
            if sequence.block_table:
                errors.append(f"{sequence.key}: waits with {len(sequence.block_table)} blocks")
        return errors + self._flights.audit(self._sequences.values())

    def _register(self, sequence: Sequence) -> None:
        assert sequence.key not in self._sequences, f"{sequence.key} is known already"
        assert sequence.status is SequenceStatus.WAITING
        assert 1 <= sequence.num_tokens <= self._config.max_model_len
        sequence.num_scheduled_tokens = sequence.num_computed_tokens
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._sequences[sequence.key] = sequence
        self._cache.extend_hashes(sequence, sequence.num_tokens // self._pool.block_size)

    def _promote_ready(self) -> None:
        while self._ready and len(self._running) < self._config.max_num_seqs:
            self._run(self._ready.pop(next(iter(self._ready))))

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_arrival)

    def _schedule_decodes(self, decodes: list[Sequence]) -> list[ScheduledSequence]:
        # In order of arrival: a preemption never hits a sequence that has its turn already.
        items = []
        for sequence in decodes:
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence):
                items.append(ScheduledSequence.of(sequence, sequence.num_scheduled_tokens, 1))
        return items

    def _schedule_prefills(self, num_decodes: int, may_admit: bool) -> list[ScheduledSequence]:
        plan = PrefillPlan(self._config, self._prefill_budget(num_decodes))
        for sequence in self._running:
            if not _is_decoding(sequence):
                plan.add(sequence)
        if may_admit:
            self._admit_into(plan)
        return plan.chunks()

    def _needs_block(self, sequence: Sequence) -> bool:
        """Whether the KV of a decoding sequence's next token has no room."""
        num_blocks = self._num_blocks_for(sequence.num_scheduled_tokens + 1)
        return len(sequence.block_table) < num_blocks

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for the newest token's KV; False when `sequence` itself had to go."""
        if not self._needs_block(sequence):
            return True
        while (block_ids := self._pool.allocate(1)) is None:
            decodes = (other for other in self._running if _is_decoding(other))
            victim = max(chain(decodes, self._ready.values()), key=_arrival)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += block_ids
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert not self._flights, "a step is on the device"
        self._leave(sequence)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._waiting.add_preempted(sequence)
        self._preempted.append(sequence)

    def _admit_into(self, plan: PrefillPlan) -> None:
        for sequence in list(self._waiting):
            if len(self._running) >= self._config.max_num_seqs or not plan.admits_more:
                return
            if not plan.takes(sequence.num_tokens - self._cache.num_hit_tokens(sequence)):
                continue
            if not self._admit(sequence):
                return
            plan.add(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        held = self._cache.hits(sequence)
        count = self._num_blocks_for(sequence.num_tokens) - len(held)
        block_ids = self._pool.reserve(held, count, spare=self._watermark())
        if block_ids is None:
            return False
        sequence.block_table = held + block_ids
        sequence.num_computed_tokens = len(held) * self._pool.block_size
        sequence.num_scheduled_tokens = sequence.num_computed_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._waiting.remove(sequence)
        self._run(sequence)
        return True

    def _watermark(self) -> int:
        """Blocks that an admission leaves available: one per decode, within a bound.

        Without them, the decodes' next blocks would preempt what has just been admitted.
        """
        num_decodes = sum(_is_decoding(sequence) for sequence in self._running)
        return min(num_decodes, self._max_watermark)

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        del self._sequences[sequence.key]
        sequence.status = SequenceStatus.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running or ready sequence out and releases its blocks, at once or when the
        steps on the device are over."""
        if self._ready.pop(sequence.key, None) is None:
            self._running.remove(sequence)
        block_ids = sequence.block_table[::-1]
        if sequence.copy_source is not None:
            block_ids.append(sequence.copy_source)
        sequence.block_table, sequence.copy_source = [], None
        self._flights.release(sequence, block_ids)

    def _drop_copy_source(self, sequence: Sequence) -> None:
        """The copy is made."""
        if sequence.copy_source is not None:
            self._pool.release([sequence.copy_source])
            sequence.copy_source = None

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _is_decoding(sequence: Sequence) -> bool:
    """Whether one step takes it to its next token with a single token computed, which may be
    one that the step on the device yields."""
    return num_remaining(sequence) <= 1
