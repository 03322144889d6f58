"""What cannot start says why in one line and exits with a code that is not zero."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests import tiny_models
from tests.e2e.stack import run_baton

pytestmark = pytest.mark.e2e


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "model")


def fails(model: Path | str, *args: str) -> str:
    """The one line that `baton up` ends with."""
    done = run_baton("up", "--model", str(model), "--port", "0", *args)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("waiting for")]
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return errors[0]


def test_a_missing_model_folder() -> None:
    assert "does not exist" in fails("/no/such/model")


def test_a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json" in fails(folder)


def test_an_unsupported_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    line = fails(folder)
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


def test_broken_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in fails(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "safetensors" in fails(folder)


def test_no_room_for_a_single_block(folder: Path) -> None:
    assert "block" in fails(folder, "--kv-cache-memory-bytes", "100")


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails(folder, "--port", str(port))
        assert f"127.0.0.1:{port}" in line


def test_a_wrong_flag_is_a_usage_error(folder: Path) -> None:
    done = run_baton("up", "--model", str(folder), "--no-such-flag")
    assert done.returncode == 2
