"""The compiled kernels, built once for all tests that need them."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.native.build import BuildError, build, default_cache
from engine.native.library import Library


@functools.cache
def native_library(dtype: torch.dtype) -> Library:
    """Skips the test on a machine without a compiler."""
    try:
        return Library(build(default_cache()), dtype)
    except BuildError as error:
        pytest.skip(str(error))
