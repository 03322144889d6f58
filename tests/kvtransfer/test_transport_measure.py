"""Measuring a transport reads whole pools."""

from __future__ import annotations

import pytest

from core.errors import TransferError
from kvtransfer.measure import local_pair


async def test_a_pair_reads_its_whole_pool() -> None:
    async with local_pair("tcp", num_blocks=8, block_bytes=4096) as pair:
        await pair.test()
        assert await pair.pull() > 0.0


async def test_a_pair_notices_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_pair("tcp", num_blocks=8, block_bytes=4096) as pair:
        monkeypatch.setattr(pair.pool, "block", lambda block_id: bytes(4096))
        with pytest.raises(TransferError, match="other content"):
            await pair.test()
