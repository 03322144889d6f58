"""What bench.serve starts, and what it reads out of turns."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bench import serve
from bench.serve_model import vocabulary
from bench.serve_peer import Subject
from bench.serve_stacks import Endpoint, colocated, disaggregated
from bench.serve_vllm import Peer, is_installed


def subject(*itls_ms: float) -> Subject:
    endpoint = Endpoint(name="x", model="m", vocab_size=100, max_model_len=100)
    return Subject("x", endpoint, turns=[{"itl_p99_ms": value} for value in itls_ms])


def test_workers_share_the_cores_equally() -> None:
    topology = disaggregated(1, 2, range(7))
    assert topology.cores == {"prefill-0": (0, 1), "decode-0": (2, 3), "decode-1": (4, 5)}
    assert topology.threads == 2


def test_workers_that_outnumber_the_cores_run_anywhere() -> None:
    topology = disaggregated(2, 1, [0, 1])
    assert (dict(topology.cores), topology.threads) == ({}, 1)


def test_a_colocated_worker_has_all_cores_and_keeps_every_prompt() -> None:
    topology = colocated(512, [0, 1])
    assert (dict(topology.cores), topology.threads) == ({"decode-0": (0, 1)}, 2)
    assert topology.decode_args == ("--local-prefill-chunk", "512")
    assert topology.router_args == ("--local-prefill-max-tokens", "1048576")


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    # The machine was ten times slower in the second round: for both.
    assert subject(10.0, 100.0, 12.0).ratio("itl_p99_ms", subject(5.0, 50.0, 4.0)) == 2.0


def test_every_token_of_the_bench_model_is_text_of_its_own() -> None:
    vocab = vocabulary(32_000)
    assert len(vocab) == 32_000
    assert [vocab[word] for word in ("A", "~", "aaaa", "aaab")] == [65, 126, 128, 129]


def test_the_peer_stays_on_its_cores_with_a_thread_on_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    peer = Peer(tmp_path / "bin/python", tmp_path / "model", max_model_len=4096)
    spec = peer.server("vllm", 8000, (0, 1), "--max-num-batched-tokens", "512")
    assert spec.argv[-2:] == ("--max-num-batched-tokens", "512")
    assert spec.argv[:3] == ("taskset", "-c", "0,1")
    assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    # What this project keeps on the path has names that others' packages may have.
    assert spec.env["PYTHONPATH"] == ""


def test_an_environment_without_the_peer_is_told_from_one_with_it(tmp_path: Path) -> None:
    assert not is_installed(Path(sys.executable))
    assert not is_installed(tmp_path / "no-such-python")


def test_without_the_peer_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--peer", "vllm"])
    assert serve.main() == 0
    out, err = capsys.readouterr()
    assert "vllm is not installed" in out
    assert "pip install" in err and "--peer-python" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "0"], "--rate"),
        (["--prompt", "9-3"], "--prompt"),
        (["--url", "localhost:8000"], "'localhost:8000' is not like http://HOST:PORT/v1"),
        (["--url", "http://x/v1", "--trace", "/no-such-file"], "/no-such-file"),
        (["--grpc", "127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_a_wrong_argument_ends_it_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", *arguments])
    with pytest.raises(SystemExit) as ending:
        serve.main()
    assert ending.value.code == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]
