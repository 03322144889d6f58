"""The decode pod of `bench.routing`: a fluid that flows step by step."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from bench.routing_pods import BLOCK, CostModel, Holdings, Job
from bench.routing_trace import TRACE_BLOCK
from router.routing import Work

LOCAL_CHUNK = 128
"""Tokens of a prompt in a step that decodes too."""


class DecodePod:
    """All sequences advance by one token a step, and a prompt among them by a chunk.

    Between two events the time of a step is taken as constant.
    """

    def __init__(self, name: str, costs: CostModel, holdings: Holdings, num_blocks: int) -> None:
        self.name = name
        self.holdings = holdings
        self.sequence_s = 0.0
        """Number of its requests, integrated over time."""
        self._costs = costs
        self._clock = holdings.clock
        self._num_blocks = num_blocks
        self._jobs: set[Job] = set()
        self._num_taken = 0
        self._waiting: list[Callable[[], None]] = []
        self._line: deque[Job] = deque()
        """Prompts to compute here; the first is being computed."""
        self._chunk_left = 0.0
        """Tokens of that one still to compute."""
        self._running: list[tuple[float, int, Job]] = []
        """By the step at which they end."""
        self._context_tokens = 0.0
        self._step = 0.0
        self._advanced_at = 0.0
        self._version = 0

    def assign(self, job: Job) -> None:
        """A dispatch has come."""
        self._advance()
        self._jobs.add(job)

    def take_room(self, job: Job, retry: Callable[[], None]) -> bool:
        """Room for the whole request; without it `retry` is called when some is free."""
        is_alone = self._num_taken == 0
        if not is_alone and self._num_taken + job.num_blocks > self._num_blocks:
            if retry not in self._waiting:
                self._waiting.append(retry)
            return False
        self._num_taken += job.num_blocks
        job.has_room = True
        return True

    def prefill(self, job: Job) -> None:
        """Computes a prompt here, as soon as there is room and its turn has come."""
        self.assign(job)
        self._line.append(job)
        self._start_line()

    def run(self, job: Job) -> None:
        """Decodes a sequence whose first token is there."""
        self._advance()
        self.holdings.store(job.request.hash_ids)
        job.began_step = self._step
        self._context_tokens += job.request.num_prompt
        ends = self._step + job.request.num_outputs - 1
        heapq.heappush(self._running, (ends, job.number, job))
        self._plan()

    def report(self) -> tuple[Work, float]:
        """What a load report says now: the work, and the blocks that nobody has a claim on."""
        self._advance()
        queued = self._chunk_left + sum(
            job.request.num_prompt for job in list(self._line)[1 if self._chunk_left else 0 :]
        )
        claimed = sum(job.num_blocks for job in self._jobs)
        work = Work(queued / BLOCK, len(self._jobs), claimed)
        return work, self._num_blocks - claimed

    def _start_line(self) -> None:
        if self._line and not self._chunk_left:
            job = self._line[0]
            if not job.has_room and not self.take_room(job, self._start_line):
                return
            held = self.holdings.cache.num_held(job.request.hash_ids) * TRACE_BLOCK
            job.computed_tokens = max(1, job.request.num_prompt - held)
            self._chunk_left = float(job.computed_tokens)
        self._plan()

    @property
    def _step_s(self) -> float:
        seconds = 0.0
        if self._running:
            seconds = self._costs.decode_s(len(self._running), self._context_tokens)
        if self._chunk_left:
            context = self._line[0].request.num_prompt
            seconds += self._costs.prefill_s(LOCAL_CHUNK, context)
        return seconds

    def _advance(self) -> None:
        elapsed_s = self._clock.now - self._advanced_at
        self._advanced_at = self._clock.now
        self.sequence_s += elapsed_s * len(self._jobs)
        step_s = self._step_s
        if step_s == 0 or elapsed_s == 0:
            return
        steps = elapsed_s / step_s
        self._step += steps
        self._context_tokens += steps * len(self._running)
        self._chunk_left = max(0.0, self._chunk_left - steps * LOCAL_CHUNK)

    def _plan(self) -> None:
        """Sets the alarm for what happens next."""
        self._version += 1
        version = self._version
        steps = []
        if self._running:
            steps.append(max(0.0, self._running[0][0] - self._step))
        if self._line and (self._chunk_left or self._line[0].computed_tokens):
            steps.append(self._chunk_left / LOCAL_CHUNK)
        if steps:
            # A little late, so that rounding leaves nothing of a step to do.
            at_s = self._clock.now + min(steps) * self._step_s + 1e-9
            self._clock.at(at_s, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        if self._line and self._line[0].computed_tokens and self._chunk_left < 1e-3:
            self._chunk_left = 0.0
            job = self._line.popleft()
            job.on_first_token(job)
            self.run(job)
            self._start_line()
        while self._running and self._running[0][0] <= self._step + 1e-6:
            _, _, job = heapq.heappop(self._running)
            self._finish(job)
        self._plan()

    def _finish(self, job: Job) -> None:
        self._context_tokens -= job.request.num_prompt + self._step - job.began_step
        if not self._running:
            self._context_tokens = 0.0
        self._jobs.remove(job)
        self._num_taken -= job.num_blocks
        job.on_end(job)
        waiting, self._waiting = self._waiting, []
        for retry in waiting:
            retry()
