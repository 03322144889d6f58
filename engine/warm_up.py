"""A first request that nobody waits for: what a process pays once is paid before it serves.

On a GPU kernels are compiled and loaded at their first call, and the libraries choose their ways
for shapes that they have not seen. A CPU's first step is hardly slower than later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from core.sampling import SamplingParams
from engine.batch import broken_sequences
from engine.engine import Engine
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence

MAX_PROMPT_TOKENS = 32
"""Two blocks of the usual size; a quarter of a second on a CPU with a small model."""
NUM_OUTPUTS = 4
_TOKEN_STRIDE = 7919
"""Between the ids of a prompt's tokens, so that they lie all over the embedding table."""
_SAMPLING = (
    SamplingParams(max_tokens=NUM_OUTPUTS),
    SamplingParams(max_tokens=NUM_OUTPUTS, temperature=1.0, top_p=0.9, top_k=50),
)


def warm_up(engine: Engine, progress: Callable[[str], None]) -> None:
    """Computes prompts and a few more tokens, greedy and drawn, and tells `progress`.

    On the device thread, before anybody else uses the pool: afterwards all of its blocks are
    free, and the prefix cache has not heard of it.
    """
    began_at = time.monotonic()
    config = SchedulerConfig(
        max_model_len=engine.max_model_len,
        max_num_seqs=min(len(_SAMPLING), engine.config.max_num_seqs),
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config, engine.pool)
    for sequence in _sequences(engine):
        scheduler.add(sequence)
    num_steps = 0
    while (batch := scheduler.schedule()) is not None:
        result = engine.runner.execute(batch)
        num_steps += 1
        broken = broken_sequences(batch, result)
        if broken:
            # Perhaps only of such a senseless prompt: real ones will tell.
            progress("warm-up: the model's logits are not finite")
        for sequence in broken:
            scheduler.abort(sequence.key)
        scheduler.postprocess(batch, result)
    progress(f"warm-up: {num_steps} steps in {time.monotonic() - began_at:.2f} s")


def _sequences(engine: Engine) -> list[Sequence]:
    num_tokens = max(1, min(MAX_PROMPT_TOKENS, engine.max_model_len - NUM_OUTPUTS))
    vocab_size = engine.model_config.vocab_size
    prompt = [index * _TOKEN_STRIDE % vocab_size for index in range(num_tokens)]
    return [
        Sequence(f"warm-up-{number}", 0, list(prompt), sampling, scope=b"")
        for number, sampling in enumerate(_SAMPLING)
    ]
