"""Measuring a transport reads whole pools and knows which way the bytes went."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import TransferError
from kvtransfer.measure import local_pair, ucx_route

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


async def test_a_pair_reads_its_whole_pool() -> None:
    async with local_pair("tcp", num_blocks=8, block_bytes=4096) as pair:
        await pair.test()
        assert await pair.pull() > 0.0


async def test_a_pair_notices_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_pair("tcp", num_blocks=8, block_bytes=4096) as pair:
        monkeypatch.setattr(pair.pool, "block", lambda block_id: bytes(4096))
        with pytest.raises(TransferError, match="other content"):
            await pair.test()


def test_the_route_is_read_from_what_ucx_writes_down(tmp_path: Path) -> None:
    log = tmp_path / "ucx.log"
    assert ucx_route(log) is None
    log.write_text("nothing of interest")
    assert ucx_route(log) is None
    log.write_text(UCX_LOG)
    assert ucx_route(log) == "cma/memory"
    log.write_text(UCX_SENDING_LOG)
    assert ucx_route(log) == "tcp/lo"
