"""What this machine can do at best: how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.engine_steps import Case, Clock
from engine.engine import Engine

_NUM_BYTES = 1 << 29
_REPEATS = 5
_ROWS, _INNER, _COLUMNS = 1024, 1024, 5632


@dataclass(frozen=True)
class Limits:
    """Best rates of all threads together."""

    bytes_per_s: float
    """Of reading or of copying (bytes read plus written), whichever is faster."""
    flops_per_s: float
    """Of a matrix product in the model's dtype."""

    def step_s(self, num_bytes: float, num_flops: float) -> float:
        """Least time for a step: memory and arithmetic overlap perfectly."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def measure_limits(dtype: torch.dtype, clock: Clock) -> Limits:
    """Medians of a few runs with the threads that PyTorch uses now."""
    source = torch.ones(_NUM_BYTES // 8, dtype=torch.float64)
    target = torch.empty_like(source)
    read_s = _median_s(lambda: source.sum(), clock)
    copy_s = _median_s(lambda: target.copy_(source), clock)
    left = torch.randn(_ROWS, _INNER).to(dtype)
    right = torch.randn(_INNER, _COLUMNS).to(dtype)
    multiply_s = _median_s(lambda: left @ right, clock)
    return Limits(
        bytes_per_s=max(_NUM_BYTES / read_s, 2 * _NUM_BYTES / copy_s),
        flops_per_s=2 * _ROWS * _INNER * _COLUMNS / multiply_s,
    )


@dataclass(frozen=True)
class Work:
    """What a model's step cannot do without."""

    weight_bytes: int
    """Of everything but the embedding, of which a step reads a few rows only, and scales."""
    weight_flops: int
    """Of one token through all matrices but the last."""
    head_flops: int
    """Of one token's logits."""
    kv_bytes: int
    """Of one token."""
    attention_flops: int
    """Of one query and one key."""

    @classmethod
    def of(cls, engine: Engine) -> Work:
        config = engine.model_config
        itemsize = engine.kv_cache.shape.dtype.itemsize
        layer_itemsize = itemsize if engine.config.quantization == "none" else 1
        hidden, inner = config.hidden_size, config.intermediate_size
        layer = hidden * (2 * config.q_size + 2 * config.kv_size + 3 * inner)
        head = config.vocab_size * hidden
        return cls(
            weight_bytes=layer_itemsize * layer * config.num_layers + itemsize * head,
            weight_flops=2 * layer * config.num_layers,
            head_flops=2 * head,
            kv_bytes=2 * itemsize * config.kv_size * config.num_layers,
            attention_flops=4 * config.q_size * config.num_layers,
        )

    def least_s(self, limits: Limits, case: Case) -> float:
        """Least seconds for a step of this kind; half of a prompt's keys are masked."""
        tokens = case.num_tokens
        if case.phase == "decode":
            num_flops = self.weight_flops + self.head_flops + self.attention_flops * case.context
            num_bytes = self.weight_bytes + tokens * case.context * self.kv_bytes
            return limits.step_s(num_bytes, tokens * num_flops)
        attention = self.attention_flops * tokens * (tokens + 1) // 2
        return limits.step_s(
            self.weight_bytes, tokens * self.weight_flops + self.head_flops + attention
        )


def _median_s(run: Callable[[], object], clock: Clock) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        began_at = clock()
        run()
        times.append(clock() - began_at)
    return statistics.median(times)
