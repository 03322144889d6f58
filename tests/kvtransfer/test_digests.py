"""Digests tell apart the bytes that were asked about, and only those."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtransfer.base import BlockPart
from kvtransfer.digests import BlockDigests
from kvtransfer.local_peer import HostPool

BLOCK_BYTES = 64


@pytest.fixture
def pool() -> HostPool:
    pool = HostPool(4, BLOCK_BYTES)
    pool.fill(7)
    return pool


@pytest.fixture
def digests(pool: HostPool) -> Iterator[BlockDigests]:
    digests = BlockDigests(pool.region)
    yield digests
    digests.close()


async def test_a_digest_changes_with_any_byte_of_its_block(
    pool: HostPool, digests: BlockDigests
) -> None:
    before = await digests.of([0, 1, 2])
    pool.memory[2 * BLOCK_BYTES - 1] ^= 1
    after = await digests.of([0, 1, 2])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


async def test_a_digest_of_a_part_ignores_the_bytes_around_it(
    pool: HostPool, digests: BlockDigests
) -> None:
    part = BlockPart(16, 8)
    before = await digests.of([1], part)
    pool.memory[BLOCK_BYTES + 15] ^= 1
    pool.memory[BLOCK_BYTES + 24] ^= 1
    assert await digests.of([1], part) == before
    pool.memory[BLOCK_BYTES + 23] ^= 1
    assert await digests.of([1], part) != before


async def test_a_part_that_is_the_whole_block_has_the_digest_of_the_block(
    digests: BlockDigests,
) -> None:
    assert await digests.of([3, 0], BlockPart(0, BLOCK_BYTES)) == await digests.of([3, 0])
    assert await digests.of([]) == []
