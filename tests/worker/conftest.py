"""A small random model, and what transformers makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_models
from tests.engine.harness import reference_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def expected():  # type: ignore[no-untyped-def]
    model = tiny_models.random_model(tiny_models.VARIANTS["llama"])
    return lambda prompt, num_outputs=8: reference_tokens(model, prompt, num_outputs)


@pytest.fixture(params=["0", "1"], ids=["in turn", "ahead"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether workers plan steps ahead."""
    monkeypatch.setenv("BATON_ASYNC_SCHEDULING", request.param)


@pytest.fixture(autouse=True)
def slow_goodbyes() -> Iterator[None]:
    """A worker that stops is not cut short, which would leave threads to later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.host.STOP_GRACE_S", 30.0)
        yield
