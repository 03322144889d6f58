"""Kernels compiled ahead of time: nothing spills, and everything fits the shared memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.kernels import (
    ARCHITECTURES,
    MODEL_SHAPES,
    SHARED_LIMITS,
    ModelShape,
    compile_for,
    model_launches,
)


def check(shape: ModelShape, architecture: int) -> None:
    launches = model_launches(shape, architecture)
    names = {launch.kernel.__name__ for launch in launches}
    assert len(names) == 9
    for launch in launches:
        usage = compile_for(launch, architecture)
        assert usage.spilled_bytes == 0, launch
        assert usage.shared_bytes <= SHARED_LIMITS[architecture], launch


def test_kernels_of_an_8b_model_spill_nothing_on_sm_90() -> None:
    check(MODEL_SHAPES[0], 90)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_spill_nothing(shape: ModelShape, architecture: int) -> None:
    check(shape, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [80, 192, 256])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_any_head_dim_spill_nothing(
    dtype: torch.dtype, head_dim: int, architecture: int
) -> None:
    check(replace(MODEL_SHAPES[0], head_dim=head_dim, dtype=dtype), architecture)
