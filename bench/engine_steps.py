"""Single kinds of steps of an engine, timed: the cases of `bench.engine`."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from core.sampling import SamplingParams
from engine.engine import EngineConfig, load_engine
from engine.sequence import Sequence

CONTEXT = 512
DECODE_STEPS = 12
NUM_BLOCKS = 2000
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


class EngineSubject:
    """Baton's engine with the parts that a pod puts around the model."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        began_at = time.perf_counter()
        self.engine = load_engine(
            EngineConfig(
                model=folder,
                dtype=dtype,
                num_threads=num_threads,
                num_gpu_blocks_override=NUM_BLOCKS,
                max_model_len=MAX_MODEL_LEN,
                long_prefill_token_threshold=MAX_MODEL_LEN,
            ),
            lambda message: None,
        )
        self.load_s = time.perf_counter() - began_at
        self._random = random.Random(0)
        for case in CASES:
            self.step_s(case)

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.kv_cache.shape.dtype

    def step_s(self, case: Case) -> float:
        """Seconds of a step of this kind, scheduling and sampling included; a median."""
        if case.phase == "prefill":
            return self._prefill_s(case.num_tokens)
        return self._decode_s(case.num_tokens)

    def _prefill_s(self, num_tokens: int) -> float:
        self._add("prompt", num_tokens, num_outputs=1)
        return self._step()

    def _decode_s(self, batch: int) -> float:
        names = [f"r{index}" for index in range(batch)]
        for name in names:
            self._add(name, CONTEXT, num_outputs=MAX_MODEL_LEN - CONTEXT)
        scheduler = self.engine.scheduler
        while scheduler.num_waiting or scheduler.num_queued_tokens > batch:
            self._step()
        self._step()
        times = [self._step() for _ in range(DECODE_STEPS)]
        for name in names:
            scheduler.abort((name, 0, 0))
        return statistics.median(times)

    def _add(self, name: str, num_tokens: int, num_outputs: int) -> None:
        vocab_size = self.engine.model_config.vocab_size
        prompt = [self._random.randrange(vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0)
        self.engine.scheduler.add(Sequence(name, 0, prompt, sampling, b""))

    def _step(self) -> float:
        began_at = time.perf_counter()
        batch = self.engine.scheduler.schedule()
        assert batch is not None
        self.engine.scheduler.postprocess(batch, self.engine.runner.execute(batch))
        return time.perf_counter() - began_at
