"""Which way KV moves is read from what UCX writes down."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.nixl_library import installed_nixl
from kvtransfer.routes import LinkKind, UcxLog, link_kind, ucx_routes

UCX_LOG = """\
[1.0] [vm:7:0]   +--------+-------------+------------+
[1.0] [vm:7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:7:0]   +--------+-------------+------------+
[1.0] [vm:7:0]   | Range  | Description |   Config   |
[1.0] [vm:7:0]   +--------+-------------+------------+
[1.0] [vm:7:0]   | 0..inf | zero-copy   | cma/memory |
[1.0] [vm:7:0]   +--------+-------------+------------+
"""


UCX_SENDING_LOG = """\
[1.0] [vm:7:0]   +--------+------------------------------------------------------+
[1.0] [vm:7:0]   | cfg#0  | tagged message by ucp_tag_send* from host memory     |
[1.0] [vm:7:0]   +--------+------------------------------------------------------+
[1.0] [vm:7:0]   +--------+------------------------------------------------------+
[1.0] [vm:7:0]   +-------------+----------------------------------------+--------+
[1.0] [vm:7:0]   | cfg#1       | tagged message by ucp_tag_send* from host memory |
[1.0] [vm:7:0]   +-------------+----------------------------------------+--------+
[1.0] [vm:7:0]   |           0 | eager short                            | tcp/lo |
[1.0] [vm:7:0]   |     1..8191 | eager zero-copy copy-out               | tcp/lo |
[1.0] [vm:7:0]   |     8K..inf | (?) rendezvous zero-copy               | tcp/lo |
[1.0] [vm:7:0]   +-------------+----------------------------------------+--------+
"""


def test_the_route_is_the_last_row_of_the_table_of_reads_or_of_sends() -> None:
    assert ucx_routes("nothing of interest") == ()
    assert ucx_routes(UCX_LOG) == ("cma/memory",)
    assert ucx_routes(UCX_SENDING_LOG) == ("tcp/lo",)


def test_each_route_is_told_once_in_order_of_appearance() -> None:
    text = UCX_LOG + UCX_LOG.replace("cma/memory", "tcp/eth0  ") + UCX_LOG
    assert ucx_routes(text) == ("cma/memory", "tcp/eth0")


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("cma/memory", LinkKind.SHARED_MEMORY),
        ("tcp/eth0", LinkKind.TCP),
        ("rc_mlx5/mlx5_0:1", LinkKind.RDMA),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1", LinkKind.RDMA),
        ("90% on rc_mlx5/mlx5_0:1 and 10% on tcp/eth0", LinkKind.TCP),
        ("cuda_ipc/cuda", LinkKind.CUDA_IPC),
        ("a transport of the future/x", LinkKind.TCP),
        ("", LinkKind.TCP),
    ],
)
def test_a_route_is_as_fast_as_its_slowest_part(route: str, kind: LinkKind) -> None:
    assert link_kind(route) is kind


def test_kinds_have_the_labels_of_the_setting() -> None:
    assert [kind.label for kind in LinkKind] == ["tcp", "rdma", "shared-memory", "cuda-ipc"]
    assert LinkKind.of_label("shared-memory") is LinkKind.SHARED_MEMORY


def test_a_log_that_is_not_there_yet_tells_of_no_route(tmp_path: Path) -> None:
    assert UcxLog(tmp_path / "ucx.log").routes() == ()


def test_what_ucx_says_beside_its_tables_is_passed_on_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = UcxLog(tmp_path / "ucx.log")
    log.path.write_text(UCX_LOG + "[1.0] [vm:7:0] tcp_ep.c:1 UCX  ERROR connection reset\n")
    with caplog.at_level(logging.WARNING):
        assert log.routes() == log.routes() == ("cma/memory",)
    assert len(caplog.records) == 1


@pytest.mark.skipif(installed_nixl() is None, reason="needs NIXL")
def test_a_silent_fallback_to_tcp_is_seen() -> None:
    command = [sys.executable, "-m", "kvtransfer", "measure", "--transport", "nixl"]
    environment = {**os.environ, "UCX_TLS": "tcp,self"}
    result = subprocess.run(
        [*command, "--num-blocks", "8", "--repetitions", "1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "over nixl, tcp/" in result.stdout
