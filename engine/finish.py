"""When a sequence is at its end."""

from __future__ import annotations

from core.sampling import SamplingParams
from engine.sequence import FinishReason, Sequence


def finish_reason(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why `sequence` ends with its newest output; None while it goes on.

    All outputs count, those of earlier attempts included.
    """
    outputs = sequence.output_token_ids
    num_left = max_model_len - sequence.num_tokens
    return finish_reason_at(outputs[-1], len(outputs), num_left, sequence.sampling)


def ends_with_next(sequence: Sequence, max_model_len: int) -> bool:
    """Whether the next output is the last, whatever it is."""
    num_outputs = len(sequence.output_token_ids) + 1
    return num_outputs >= sequence.sampling.max_tokens or sequence.num_tokens + 1 >= max_model_len


def finish_reason_at(
    token_id: int, num_outputs: int, num_left: int, sampling: SamplingParams
) -> FinishReason | None:
    """Why a sequence ends whose newest of `num_outputs` outputs is `token_id`.

    `num_left` tokens more fit the context. An end or stop token ends nothing while there are
    fewer than `min_tokens` outputs with it.
    """
    is_stop = token_id in sampling.eos_token_ids or token_id in sampling.stop_token_ids
    if is_stop and num_outputs >= sampling.min_tokens:
        return FinishReason.STOP
    if num_outputs >= sampling.max_tokens or num_left <= 0:
        return FinishReason.LENGTH
    return None
