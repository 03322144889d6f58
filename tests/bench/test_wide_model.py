"""The random model of bench.handoff is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.handoff_stacks import BLOCK_SIZE, Model
from bench.wide_model import wide_model


def test_the_wide_model_has_64_kib_of_kv_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    folder = wide_model()
    model = Model("wide", folder)
    assert model.block_bytes == BLOCK_SIZE * 64 * 1024
    assert wide_model() == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
