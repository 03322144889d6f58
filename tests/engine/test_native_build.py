"""Compiling the kernels, and what an engine does where that fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from core.errors import StartupError
from engine.cpu_kernels import choose_kernels
from engine.native import build as build_module
from engine.native.build import BuildError, build
from engine.ops import TorchOps

CPU = torch.device("cpu")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its output's name there, and a line per call into `calls`."""
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        'while [ "$1" != -o ]; do shift; done\nsleep 0.05\necho library > "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_a_library_is_compiled_once_by_all_who_ask_at_the_same_time(
    compiler: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as threads:
        libraries = set(threads.map(build, [cache] * 4))
    assert len(libraries) == 1
    assert libraries.pop().read_text() == "library\n"
    links = [line for line in (tmp_path / "calls").read_text().splitlines() if "-shared" in line]
    assert len(links) == 1


def test_another_cpu_gets_a_library_of_its_own(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "cache")
    monkeypatch.setattr(build_module, "_cpu_flags", lambda: "flags: others")
    assert build(tmp_path / "cache") != first


def test_a_failing_compiler_is_told_with_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match="failed: no such option"):
        build(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_pytorch_does_it_and_the_log_says_why() -> None:
    lines: list[str] = []
    kernels = choose_kernels("auto", torch.float32, CPU, lines.append)
    assert isinstance(kernels.ops, TorchOps)
    assert kernels.library is None
    assert lines[0] == (
        "PyTorch's kernels instead of compiled ones: there is no compiler no-such-compiler"
    )


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_native_kernels_are_refused() -> None:
    with pytest.raises(StartupError, match="there is no compiler"):
        choose_kernels("native", torch.float32, CPU, print)


def test_half_precision_runs_on_pytorch() -> None:
    lines: list[str] = []
    kernels = choose_kernels("auto", torch.float16, CPU, lines.append)
    assert kernels.library is None and kernels.pack is None
    assert lines[0].endswith("dtype torch.float16 is not supported")
