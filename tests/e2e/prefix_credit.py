"""What the prefix index says, asked of the index itself: where requests go depends on load, too."""

from __future__ import annotations

import asyncio
import time

from core.fingerprint import hash_scope
from core.hashing import block_hashes
from core.prefix_index import PrefixIndexReader
from core.redis_client import connect_redis
from core.registry import Registry
from tests.faults.control import eventually

REPORT_S = 1.5
"""After so long no load report tells of work that is over: one that does sends requests away."""


def credit(redis_url: str, prompt: list[int]) -> dict[str, int]:
    """How many blocks of a prompt the index says that each worker holds."""

    async def ask() -> dict[str, int]:
        redis = connect_redis(redis_url, timeout_s=30.0)
        try:
            records = await Registry(redis).list()
            if not records:
                return {}
            scope = hash_scope(records[0].fingerprint)
            hashes = block_hashes(prompt, records[0].fingerprint.block_size, scope)
            candidates = {record.worker_id: record.epoch for record in records}
            return await PrefixIndexReader(redis).lookup(hashes, candidates)
        finally:
            await redis.aclose()

    return asyncio.run(ask())


def wait_credit(redis_url: str, prompt: list[int], worker_id: str, num_blocks: int) -> None:
    """Returns when the index has learned that a worker holds so many blocks of a prompt, and the
    router that whoever computed it has nothing more to do."""
    assert eventually(lambda: credit(redis_url, prompt).get(worker_id) == num_blocks), (
        f"{worker_id} is credited with {credit(redis_url, prompt)}, not {num_blocks}"
    )
    time.sleep(REPORT_S)
