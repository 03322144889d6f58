"""Sequences, schedulers and a runner without a model, for tests of the bookkeeping."""

from __future__ import annotations

from core.hashing import scope_hash
from core.sampling import SamplingParams
from engine.batch import SampledToken, SequenceUpdate, StepBatch, StepResult
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence

BLOCK_SIZE = 4
EOS = 999
SCOPE = scope_hash("test")


def make_sequence(
    request_id: str,
    prompt: list[int] | int,
    *,
    outputs: list[int] | None = None,
    max_tokens: int = 100,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> Sequence:
    """`prompt` as a number: that many tokens which no other request id has."""
    if isinstance(prompt, int):
        first = 1000 * (1 + sum(request_id.encode()))
        prompt = list(range(first, first + prompt))
    return Sequence(
        request_id=request_id,
        attempt=1,
        prompt_token_ids=prompt,
        output_token_ids=list(outputs or []),
        num_prior_outputs=len(outputs or []),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            eos_token_ids=(EOS,),
        ),
        scope=SCOPE,
    )


def make_scheduler(num_blocks: int = 100, **limits: int | bool) -> Scheduler:
    """A scheduler over a fresh pool of blocks of four tokens."""
    limits.setdefault("max_model_len", min(200, num_blocks * BLOCK_SIZE))
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(SchedulerConfig(**limits), pool)  # type: ignore[arg-type]


def pool_of(scheduler: Scheduler) -> BlockPool:
    return scheduler._pool


def result_of(batch: StepBatch, token_id: int = 7) -> StepResult:
    """What a runner returns that samples `token_id` every time."""
    return StepResult(
        tuple(SampledToken(token_id) if item.samples else None for item in batch.sequences)
    )


def step(scheduler: Scheduler, token_id: int = 7) -> list[SequenceUpdate]:
    """One whole step; fails when nothing can be computed."""
    batch = scheduler.schedule()
    assert batch is not None
    return scheduler.postprocess(batch, result_of(batch, token_id))


def chunks(batch: StepBatch | None) -> list[tuple[str, int, int]]:
    """A step as (request id, start, number of tokens)."""
    assert batch is not None
    return [(item.sequence.request_id, item.start, item.num_tokens) for item in batch.sequences]


def next_chunks(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One whole step, told as `chunks` tells it."""
    batch = scheduler.schedule()
    told = chunks(batch)
    assert batch is not None
    scheduler.postprocess(batch, result_of(batch))
    return told
