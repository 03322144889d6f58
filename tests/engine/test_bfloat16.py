"""bfloat16 on every way of computing: logits stay near those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny_models
from tests.engine.logits import logits_of


@pytest.mark.parametrize("kernels_name", ["native", "torch"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "mistral-window"])
def test_logits_err_no_more_than_half_again_what_the_reference_does(
    name: str, kernels_name: str, tmp_path: Path
) -> None:
    folder = tiny_models.build(tmp_path, name)
    exact = logits_of(folder, "reference", torch.float32)

    def error_of(kernels_name: str) -> float:
        logits = logits_of(folder, kernels_name, torch.bfloat16)
        return float((logits - exact).square().mean().sqrt())

    assert error_of(kernels_name) <= 1.5 * error_of("reference")
    assert error_of(kernels_name) <= 0.05 * float(exact.std())
