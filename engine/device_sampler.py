"""Sampling on the device: which sequences it serves, and the buffers that its kernel reads."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from engine.batch import ScheduledSequence
from engine.kernels.sampling import SamplingRows, sample_rows
from engine.sampler import uniform
from engine.step_inputs import PersistentTensor


class DeviceSampler:
    """Samples up to `max_rows` rows at a time from parameters in fixed places."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._temperature = PersistentTensor((max_rows,), torch.float32, device)
        self._top_k = PersistentTensor((max_rows,), torch.int32, device)
        self._top_p = PersistentTensor((max_rows,), torch.float32, device)
        self._min_p = PersistentTensor((max_rows,), torch.float32, device)
        self._number = PersistentTensor((max_rows,), torch.float64, device)

    def serves(self, item: ScheduledSequence) -> bool:
        """Whether logits, temperature, top_k, top_p, min_p and the seed alone decide the token."""
        params = item.sequence.sampling
        return not (
            params.logit_bias
            or params.has_penalties
            or params.logprobs is not None
            or item.output_index < params.min_tokens
        )

    def write(self, items: Rows[ScheduledSequence], size: int) -> None:
        """Sets the parameters of the first `size` rows; rows that pad are greedy."""
        params = [item.sequence.sampling for item in items]
        numbers = [uniform(item.sequence.sampling.seed, item.output_index) for item in items]
        self._temperature.write([each.temperature for each in params], size, 0.0)
        self._top_k.write([each.top_k for each in params], size, 0)
        self._top_p.write([each.top_p for each in params], size, 1.0)
        self._min_p.write([each.min_p for each in params], size, 0.0)
        self._number.write(numbers, size, 0.5)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids int32 [rows] of [rows, vocab_size], by the parameters last written.

        -1 where a row's largest logit is not finite.
        """
        size = len(logits)
        rows = SamplingRows(
            temperature=self._temperature.device[:size],
            top_k=self._top_k.device[:size],
            top_p=self._top_p.device[:size],
            min_p=self._min_p.device[:size],
            number=self._number.device[:size],
        )
        return sample_rows(logits, rows)
