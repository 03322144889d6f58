"""One chaos run: rounds of load and faults, each with a rest in which nothing may be held."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.chaos_acts import Chaos, ChaosLimits
from bench.chaos_cases import MAX_OUTPUTS, Answer, Case, draw_cases, draw_variant
from bench.chaos_faults import Faults
from bench.chaos_load import (
    COMPLETED,
    HUNG,
    ROUTER_AWAY,
    TIE,
    UNTYPED,
    WRONG,
    Result,
    Users,
    ask_all,
    is_tie,
    learn,
)
from bench.pods import PodStack

ROUND_S = 30.0
REST_TIMEOUT_S = 30.0
NUM_NEXT_REQUESTS = 20
_BAD = (WRONG, UNTYPED, HUNG)


@dataclass(frozen=True)
class ChaosConfig:
    duration_s: float
    seed: int
    num_cases: int
    num_users: int
    limits: ChaosLimits


@dataclass
class Seen:
    """What a run has seen so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Faults = field(default_factory=Faults)
    num_retried: int = 0
    """Completed after more than one attempt."""
    num_unsteady: int = 0
    """Cases whose answers differ without any fault."""
    loaded_s: float = 0.0
    """Time under load and faults."""
    num_rests: int = 0
    num_leaked_blocks: int = 0
    not_at_rest: list[str] = field(default_factory=list)
    wrong: list[Result] = field(default_factory=list)
    """Since the last rest."""

    def note(self, result: Result) -> None:
        """Takes in how a request ended."""
        if result.outcome == UNTYPED and self.faults.was_router_away(result.started_at):
            result = replace(result, outcome=ROUTER_AWAY)
        self.outcomes[result.outcome] += 1
        self.num_retried += result.outcome == COMPLETED and result.attempts > 1
        self.faults.on_result(result)
        if result.other is not None:
            self.wrong.append(result)
        if result.outcome in _BAD:
            say(f"{result.outcome}: {result.request_id}: {result.detail}")


def say(line: str) -> None:
    """Progress, for people."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


class ChaosRun:
    """Runs against a started `stack`; `seen` grows meanwhile."""

    def __init__(self, stack: PodStack, config: ChaosConfig) -> None:
        self.seen = Seen()
        self._stack = stack
        self._config = config
        self._rng = random.Random(config.seed)
        self._known: Sequence[tuple[Case, Answer]] = ()
        self._stop = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends the run soon, with a last rest."""
        self._stop.set()

    async def run(self) -> None:
        """All rounds."""
        await self._learn()
        while not self._stop.is_set() and self.seen.loaded_s < self._config.duration_s:
            await self._round(min(ROUND_S, self._config.duration_s - self.seen.loaded_s))
            await self._rest()
            say(self._summary())

    async def _learn(self) -> None:
        with self._stack.client() as client:
            model = client.model()
        cases = draw_cases(self._config.num_cases, model, self._rng)
        say(f"asking for {len(cases)} answers without any fault, twice")
        self._known, self.seen.num_unsteady = await learn(self._stack.address, cases, MAX_OUTPUTS)

    async def _round(self, seconds: float) -> None:
        """Load and faults for so long; until every request has ended, every pod is back."""
        config, seen = self._config, self.seen
        users = Users(self._stack.address, self._known, config.num_users, seen.note)
        chaos = Chaos(self._stack, seen.faults, config.limits, say)
        is_over = asyncio.Event()
        began_at = time.monotonic()
        rngs = [random.Random(self._rng.getrandbits(64)) for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(users.run(is_over, rngs[0]))
            tasks.create_task(chaos.run(is_over, rngs[1]))
            try:
                async with asyncio.timeout(seconds):
                    await self._stop.wait()
            except TimeoutError:
                pass
            is_over.set()
            seen.loaded_s += time.monotonic() - began_at

    async def _rest(self) -> None:
        """Nothing may be held for anybody, and the next requests must be right."""
        await self._check_idle("after the faults")
        variants = [
            draw_variant(*self._rng.choice(self._known), self._rng)
            for _ in range(NUM_NEXT_REQUESTS)
        ]
        for result in await ask_all(self._stack.address, variants):
            self.seen.note(result)
            if result.outcome not in (COMPLETED, WRONG):
                self._note_unrest([f"the next request: {result.outcome}: {result.detail}"])
        await self._judge_ties()
        await self._check_idle("after the next requests")
        self.seen.num_rests += 1

    async def _judge_ties(self) -> None:
        """A wrong token is none if it is as likely as the right one, up to rounding."""
        wrong, self.seen.wrong = self.seen.wrong, []
        for result in wrong:
            if result.other is not None and await is_tie(self._stack.address, *result.other):
                say(f"{TIE}: {result.request_id}")
                self.seen.outcomes[WRONG] -= 1
                self.seen.outcomes[TIE] += 1

    async def _check_idle(self, when: str) -> None:
        held = await asyncio.to_thread(self._stack.wait_idle, REST_TIMEOUT_S)
        self._note_unrest([f"{when}: {what}" for what in held])
        if held:
            self.seen.num_leaked_blocks += await asyncio.to_thread(self._num_held_blocks)

    def _num_held_blocks(self) -> int:
        with self._stack.client() as client:
            blocks = [worker.load.blocks for worker in client.status().workers]
        return sum(each.referenced + each.quarantined for each in blocks)

    def _note_unrest(self, faults: list[str]) -> None:
        for fault in faults:
            say(f"NOT AT REST: {fault}")
        self.seen.not_at_rest += faults

    def _summary(self) -> str:
        seen = self.seen
        num_bad = sum(seen.outcomes[outcome] for outcome in _BAD)
        return (
            f"{seen.loaded_s:.0f} s: {seen.outcomes.total()} requests "
            f"({seen.outcomes[COMPLETED]} completed, {num_bad} bad), "
            f"{len(seen.faults.done)} faults, {len(seen.faults.problems)} problems of pods, "
            f"{len(seen.not_at_rest)} not at rest"
        )
