"""Models that the end-to-end tests serve, and what transformers makes of them."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench.pods import PodStack
from tests import tiny_models
from tests.engine.harness import reference_tokens

LOG_TAIL_CHARS = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """A failure shows what each process of the test's stack has said last."""
    report = yield
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.failed and isinstance(stack, PodStack):
        for pod in stack.pods:
            report.sections.append((f"log of {pod.name}", pod.log()[-LOG_TAIL_CHARS:]))
    return report


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The reference computes beside the stack's own workers."""
    torch.set_num_threads(1)


class Reference:
    """Greedy tokens of transformers' own `generate`, each computed once."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._model = model
        self._cached = functools.cache(self._compute)

    def __call__(self, prompt: list[int], num_outputs: int) -> list[int]:
        return self._cached(tuple(prompt), num_outputs)

    def _compute(self, prompt: tuple[int, ...], num_outputs: int) -> list[int]:
        return reference_tokens(self._model, list(prompt), num_outputs)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct; `make test` has put it in place, so nothing is fetched here."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.fetch_smollm2"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Reference:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return Reference(model.eval())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """`tiny(name)` gives the folder and the reference of a small random model."""

    @functools.cache
    def build(name: str) -> tuple[Path, Reference]:
        folder = tmp_path_factory.mktemp("models") / name
        tiny_models.build(folder, name)
        return folder, Reference(tiny_models.random_model(tiny_models.VARIANTS[name]))

    return build
