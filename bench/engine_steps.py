"""Single kinds of steps of an engine, timed: the cases of `bench.engine`."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from core.sampling import SamplingParams
from engine.engine import EngineConfig, load_engine
from engine.sequence import Sequence

Clock = Callable[[], float]
"""Seconds since some moment."""

CONTEXT = 512
DECODE_STEPS = 12
NUM_BLOCKS = 1300
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class Case:
    """A prefill of `num_tokens` in one step, or decode steps of `num_tokens` sequences."""

    phase: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.phase} {self.num_tokens}"

    @property
    def context(self) -> int:
        """Tokens that a decode step's sequences have, on average."""
        return CONTEXT + DECODE_STEPS // 2


CASES = (
    Case("prefill", 512),
    Case("prefill", 2048),
    Case("decode", 1),
    Case("decode", 8),
    Case("decode", 32),
)


def draw_prompts(case: Case, vocab_size: int, draw: random.Random) -> list[list[int]]:
    """What the case's step, or the steps before it, compute: ids of prompts."""
    num_prompts, length = 1, case.num_tokens
    if case.phase == "decode":
        num_prompts, length = case.num_tokens, CONTEXT
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(num_prompts)]


class EngineSubject:
    """Baton's engine with the parts that a pod puts around the model."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        """`config` says what is measured; the sizes of the cases are set here."""
        self._clock = clock
        began_at = clock()
        sized = replace(
            config,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=MAX_MODEL_LEN,
        )
        self.engine = load_engine(sized, lambda message: None)
        self.load_s = self._clock() - began_at
        # Memory that nobody has written takes no room in caches.
        self.engine.kv_cache.data.normal_()

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.kv_cache.shape.dtype

    @property
    def vocab_size(self) -> int:
        return self.engine.model_config.vocab_size

    def step_s(self, case: Case, prompts: list[list[int]]) -> float:
        """Seconds of a step of this kind, scheduling and sampling included; a median."""
        if case.phase == "prefill":
            return self._prefill_s(prompts[0])
        return self._decode_s(prompts)

    def _prefill_s(self, prompt: list[int]) -> float:
        self.engine.scheduler.add(_sequence("prompt", prompt, num_outputs=1))
        return self._step()

    def _decode_s(self, prompts: list[list[int]]) -> float:
        scheduler = self.engine.scheduler
        for index, prompt in enumerate(prompts):
            scheduler.add_computed(self._decoding(f"r{index}", prompt))
        self._step()
        times = [self._step() for _ in range(DECODE_STEPS)]
        for index in range(len(prompts)):
            scheduler.abort((f"r{index}", 0, 0))
        return statistics.median(times)

    def _decoding(self, name: str, prompt: list[int]) -> Sequence:
        """A sequence behind its first token, whose KV is what happens to be in its blocks."""
        sequence = _sequence(name, [*prompt, prompt[0]], num_outputs=2 * DECODE_STEPS)
        block_table = self.engine.pool.allocate(-(-CONTEXT // self.engine.pool.block_size))
        assert block_table is not None
        sequence.block_table = block_table
        sequence.num_computed_tokens = CONTEXT
        return sequence

    def _step(self) -> float:
        began_at = self._clock()
        batch = self.engine.scheduler.schedule()
        assert batch is not None
        self.engine.scheduler.postprocess(batch, self.engine.runner.execute(batch))
        return self._clock() - began_at


def _sequence(name: str, prompt: list[int], num_outputs: int) -> Sequence:
    return Sequence(name, 0, prompt, SamplingParams(max_tokens=num_outputs, temperature=0.0), b"")
