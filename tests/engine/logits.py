"""Logits of one prompt, by the engine and by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench.prompt_logits import prompt_logits
from engine.quantization.weight import Code
from tests.engine.harness import make_prompt

PROMPT = make_prompt(60)


def logits_of(
    folder: Path, kernels_name: str, dtype: torch.dtype, scheme: Code | None = None
) -> torch.Tensor:
    """Of every position of PROMPT, float32 [60, vocab]."""
    return prompt_logits(folder, PROMPT, kernels_name, dtype, scheme)


def reference_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """The same by transformers."""
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]
