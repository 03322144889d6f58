"""What a worker lends of its prefix cache: how much, to whom, and for how long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from core.errors import Unavailable, from_exception
from core.fingerprint import hash_scope
from core.hashing import block_hashes
from core.rpc import open_channel
from tests.engine.harness import make_prompt
from tests.worker.pair import Pair, Worker, pair
from tests.worker.reads import let_leases_end, until

PROMPT = make_prompt(320)


class Borrower:
    """Asks one worker for blocks, as a reader does."""

    def __init__(self, lender: Worker, exports: Any) -> None:
        self.lender = lender
        self.exports = exports

    async def fetch(self, name: str, hashes: list[bytes], **fields: int) -> Any:
        defaults = {"source_epoch": self.lender.address.epoch, "digest_every": 1}
        request = kv_transfer_pb2.FetchRequest(
            request_id=name, block_hashes=hashes, **(defaults | fields)
        )
        return await self.exports.Fetch(request)

    async def release(self, name: str) -> bool:
        request = kv_transfer_pb2.ReleaseRequest(request_id=name)
        return (await self.exports.Release(request)).lease_held

    def hashes(self, prompt: list[int]) -> list[bytes]:
        return block_hashes(prompt, 16, hash_scope(self.lender.host.identity.fingerprint))


@asynccontextmanager
async def borrower(folder: Path, **settings: object) -> AsyncIterator[tuple[Borrower, Pair]]:
    """Of a prefill worker that has computed PROMPT, 20 blocks."""
    async with pair(folder, prefill=settings) as both:
        await both.generate(PROMPT, "first")
        await both.until_idle()
        async with open_channel(both.prefill.address.address) as channel:
            exports = kv_transfer_pb2_grpc.KvExportStub(channel)
            yield Borrower(both.prefill, exports), both


async def test_cached_blocks_are_pinned_until_they_are_released(folder: Path) -> None:
    async with borrower(folder) as (reader, both):
        hashes = reader.hashes(PROMPT)[:5]
        reply = await reader.fetch("a", hashes)
        assert (len(set(reply.block_ids)), len(set(reply.digests))) == (5, 5)
        assert both.prefill.load.blocks.referenced == 5
        assert await reader.release("a")
        assert both.prefill.load.blocks.referenced == 0


async def test_a_repeated_question_gets_the_same_blocks_and_none_after_the_release(
    folder: Path,
) -> None:
    async with borrower(folder) as (reader, both):
        hashes = reader.hashes(PROMPT)[:5]
        assert await reader.fetch("a", hashes) == await reader.fetch("a", hashes)
        assert both.prefill.load.blocks.referenced == 5
        await reader.release("a")
        assert list((await reader.fetch("a", hashes)).block_ids) == []


async def test_a_quarter_of_the_pool_is_lent_at_a_time(folder: Path) -> None:
    async with borrower(folder) as (reader, _):
        hashes = reader.hashes(PROMPT)
        assert len((await reader.fetch("a", hashes)).block_ids) == 16
        assert len((await reader.fetch("b", hashes)).block_ids) == 0
        await reader.release("a")
        assert len((await reader.fetch("c", hashes[10:])).block_ids) == 10
        await reader.release("c")


async def test_blocks_behind_one_that_is_not_cached_are_not_lent(folder: Path) -> None:
    async with borrower(folder) as (reader, _):
        hashes = reader.hashes(PROMPT)
        for name, asked in (
            ("unknown", [b"nothing of it", *hashes]),
            ("empty", []),
            ("another", reader.hashes(make_prompt(64, seed=9))),
        ):
            assert list((await reader.fetch(name, asked)).block_ids) == []
        assert len((await reader.fetch("gap", [*hashes[:2], b"", *hashes[3:]])).block_ids) == 2
        await reader.release("gap")


async def test_what_is_lent_comes_back_when_its_lease_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.HEARTBEAT_S", 0.02)
    async with borrower(folder) as (reader, both):
        await reader.fetch("a", reader.hashes(PROMPT)[:5])
        assert both.prefill.load.exports == 1
        let_leases_end(both.prefill, monkeypatch)
        await until(lambda: both.prefill.load.exports == 0)
        assert both.prefill.load.blocks.referenced == 0
        assert not await reader.release("a")


async def test_a_later_life_lends_nothing_for_a_former_one(folder: Path) -> None:
    async with borrower(folder) as (reader, _):
        with pytest.raises(grpc.RpcError) as refused:
            await reader.fetch("a", reader.hashes(PROMPT), source_epoch=1 << 40)
        assert isinstance(from_exception(refused.value), Unavailable)


async def test_a_question_that_is_taken_back_pins_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with borrower(folder, lease_s=600.0, max_lease_s=600.0) as (reader, both):
        asked = []

        async def never(*_: object) -> list[int]:
            asked.append(both.prefill.load.blocks.referenced)
            await until(lambda: False)
            return []

        monkeypatch.setattr(both.prefill.host.digests, "of", never)
        call = reader.exports.Fetch(
            kv_transfer_pb2.FetchRequest(
                request_id="a",
                source_epoch=both.prefill.address.epoch,
                block_hashes=reader.hashes(PROMPT)[:5],
            )
        )
        await until(lambda: asked == [5])
        call.cancel()
        await both.until_idle()
