"""Log-probabilities of a prompt's own tokens, a slice of positions at a time.

Logits of a whole prompt would take [prompt, vocab_size] floats: gigabytes for a long one.
"""

from __future__ import annotations

import torch

from engine.batch import Logprobs
from engine.decoder import Decoder

_MAX_SLICE_LOGITS = 1 << 24
"""Logits computed at a time: 64 MiB in float32."""


def prompt_logprobs(
    decoder: Decoder, hidden: torch.Tensor, next_ids: list[int], num_top: int
) -> tuple[Logprobs, ...]:
    """How likely the model held each of `next_ids`, with the `num_top` likeliest instead.

    `hidden`: the decoder's hidden states [len(next_ids), hidden_size] of the positions
    before them.
    """
    num_rows = max(1, _MAX_SLICE_LOGITS // decoder.config.vocab_size)
    found: list[Logprobs] = []
    for first in range(0, len(next_ids), num_rows):
        rows = slice(first, first + num_rows)
        found += _logprobs(decoder.logits(hidden[rows]), next_ids[rows], num_top)
    return tuple(found)


def _logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[Logprobs]:
    logprobs = logits.float().log_softmax(dim=-1)
    index = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    chosen = logprobs.gather(-1, index).squeeze(-1).tolist()
    values, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    tops = zip(top_ids.tolist(), values.tolist(), strict=True)
    return [
        Logprobs(value, tuple(zip(ids, likeliest, strict=True)))
        for value, (ids, likeliest) in zip(chosen, tops, strict=True)
    ]
