"""Compiles the C++ sources once for this CPU and keeps the library in a cache folder.

Needs g++ (or what CXX names) and nothing of PyTorch but its OpenMP runtime: a second one
would bring threads of its own, which would fight with PyTorch's for the same cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
_TIMEOUT_S = 300.0


class BuildError(Exception):
    """There is no compiler, or it failed; says why in one line."""


def default_cache() -> Path:
    """Where libraries are kept: `$BATON_CACHE/native`, by default under `~/.cache/baton`."""
    return Path(os.environ.get("BATON_CACHE") or "~/.cache/baton").expanduser() / "native"


def build(cache: Path) -> Path:
    """The library's path, compiled into `cache` unless it is there: a few seconds.

    Processes that ask at the same time wait for one of them. Raises BuildError.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    library = cache / f"kernels-{_key(compiler)}.so"
    if library.exists():
        return library
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"there is no compiler {compiler[0]}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"cannot write to {cache}: {error.strerror}") from error
    return library


def _compile(compiler: list[str], library: Path) -> None:
    """Makes the whole library beside its place, and then moves it there."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        objects = []
        for source in sorted(SOURCES.glob("*.cpp")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([*compiler, *_FLAGS, "-c", str(source), "-o", objects[-1]])
        built = Path(scratch) / library.name
        _run([*compiler, "-shared", "-o", str(built), *objects, *_openmp()])
        built.rename(library)


def _openmp() -> list[str]:
    """The runtime that PyTorch has loaded; the compiler's own where PyTorch brings none."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else ["-fopenmp"]


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S:.0f} s") from None
    if result.returncode:
        first = next(iter(result.stderr.splitlines()), f"exit code {result.returncode}")
        raise BuildError(f"{command[0]} failed: {first}")


def _key(compiler: list[str]) -> str:
    """Names everything that the library depends on."""
    digest = hashlib.sha256(" ".join([*compiler, *_FLAGS, *_openmp(), _cpu_flags()]).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    """What this CPU can do, as -march=native sees it; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = ("flags", "Features", "model name")
    return " ".join(line for line in lines[:40] if line.startswith(names))
