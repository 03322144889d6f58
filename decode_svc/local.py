"""A prompt that decode computes itself: short, or a conversation whose history it holds.

    dispatch → room → engine (a small chunk in each step) → decode

It waits for room in the same line as the requests that prefill hands off. From the grant on
the scheduler owns the blocks, and the sequence is one like any other.
"""

from __future__ import annotations

from core.errors import InvalidArgument
from decode_svc.request import Request
from decode_svc.room import Room
from engine.batch import StepBatch
from worker.compute_meter import ComputeMeter
from worker.engine_loop import EngineLoop


def check_local(num_choices: int, wants_prompt_logprobs: bool) -> None:
    """Raises InvalidArgument for what only prefill does."""
    if num_choices > 1:
        raise InvalidArgument("a request with several choices needs a prefill worker", field="n")
    if wants_prompt_logprobs:
        raise InvalidArgument(
            "log-probabilities of a prompt need a prefill worker", field="prompt_logprobs"
        )


async def start_local(request: Request, room: Room, loop: EngineLoop, block_size: int) -> None:
    """Waits for room and gives the prompt to the engine, as the request's only choice."""
    sequence = request.prompt
    request.running = {sequence.choice: sequence}

    def take(held: list[int], fresh: list[int]) -> None:
        sequence.block_table = held + fresh
        sequence.num_computed_tokens = len(held) * block_size
        loop.add_allocated(sequence)

    with request.span.child("decode.queue"):
        await room.take_local(sequence, take)


class LocalMeter:
    """What a prompt token takes here, in steps that decode too."""

    def __init__(self) -> None:
        self._meter = ComputeMeter()

    @property
    def s_per_token(self) -> float:
        """0 before any prompt was computed."""
        return self._meter.s_per_token

    def observe(self, batch: StepBatch, elapsed_s: float) -> None:
        """One step is done."""
        num_tokens = sum(item.num_tokens for item in batch.sequences if item.num_tokens > 1)
        if num_tokens:
            self._meter.observe(num_tokens, elapsed_s)
