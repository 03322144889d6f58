"""When a sequence is at its end."""

from __future__ import annotations

from engine.sequence import FinishReason, Sequence


def finish_reason(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why `sequence` ends with its newest output; None while it goes on.

    All outputs count, those of earlier attempts included. An end or stop token ends nothing
    while there are fewer than `min_tokens` outputs with it.
    """
    sampling = sequence.sampling
    num_outputs = len(sequence.output_token_ids)
    token_id = sequence.output_token_ids[-1]
    is_stop = token_id in sampling.eos_token_ids or token_id in sampling.stop_token_ids
    if is_stop and num_outputs >= sampling.min_tokens:
        return FinishReason.STOP
    if num_outputs >= sampling.max_tokens or sequence.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
