"""What bench.index puts into the prefix index, and the Redis that it is put into."""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client.launch_plan import redis_process
from core.hashing import HASH_BYTES
from core.prefix_index_store import IndexStore, Life
from core.redis_client import RedisClient, connect_redis

BATCH_BLOCKS = 4096
MAX_HOLDERS = 4
START_TIMEOUT_S = 60.0


@asynccontextmanager
async def redis_server() -> AsyncIterator[RedisClient]:
    """A client of an empty Redis with nothing on disk and no other client."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        spec, url = redis_process(Path(folder))
        process = await asyncio.create_subprocess_exec(*spec.argv, stdout=subprocess.DEVNULL)
        # Longer than a service waits: a server that is slow for once is to be measured.
        client = connect_redis(url, timeout_s=30.0)
        try:
            assert spec.probe is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                await spec.probe()
            yield client
        finally:
            await client.aclose()
            process.kill()
            await process.wait()


@dataclass(frozen=True)
class Usage:
    """What Redis has used, by its own count: CPU time in µs, memory in bytes."""

    cpu_us: float
    memory_bytes: int

    @classmethod
    async def read(cls, redis: RedisClient) -> Usage:
        info = await redis.info()
        cpu_s = float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
        return cls(cpu_s * 1e6, int(info["used_memory"]))


@dataclass(frozen=True)
class Shape:
    """How much there is to know."""

    num_workers: int
    num_entries: int
    prompt_blocks: int


@dataclass
class Holdings:
    """Prompts, and who holds how many leading blocks of each."""

    prompts: list[list[bytes]] = field(default_factory=list)
    lengths: list[dict[int, int]] = field(default_factory=list)
    """One mapping for each prompt: worker → blocks."""

    @classmethod
    def shared_by_some(cls, shape: Shape, rng: random.Random) -> Holdings:
        """Prompts that begin alike (a system prompt of a sixteenth of their length, which every
        holder of any of them has) and are held by 1 to 4 workers, up to different lengths."""
        system = _hashes(shape.prompt_blocks // 16, rng)
        made = cls()
        num_entries = 0
        while num_entries < shape.num_entries:
            holders = rng.sample(range(shape.num_workers), rng.randint(1, MAX_HOLDERS))
            lengths = {worker: rng.randint(len(system), shape.prompt_blocks) for worker in holders}
            made.prompts.append(system + _hashes(shape.prompt_blocks - len(system), rng))
            made.lengths.append(lengths)
            num_entries += sum(lengths.values()) - len(system) * len(lengths)
        return made

    @classmethod
    def all_different(cls, shape: Shape, rng: random.Random) -> Holdings:
        """One prompt of which every worker holds another length: the worst for bisection."""
        lengths = rng.sample(range(1, shape.prompt_blocks + 1), shape.num_workers)
        return cls([_hashes(shape.prompt_blocks, rng)], [dict(enumerate(lengths))])

    def of_workers(self, num_workers: int) -> list[list[bytes]]:
        """All blocks that each worker holds, each once, parents first."""
        held: list[dict[bytes, None]] = [{} for _ in range(num_workers)]
        for prompt, lengths in zip(self.prompts, self.lengths, strict=True):
            for worker, length in lengths.items():
                held[worker].update(dict.fromkeys(prompt[:length]))
        return [list(blocks) for blocks in held]


class Publisher:
    """Writes for many workers at once, in batches like those of `PrefixIndexWriter`."""

    def __init__(self, redis: RedisClient, num_workers: int) -> None:
        self.candidates = {f"worker-{i}": 1 for i in range(num_workers)}
        self._store = IndexStore(redis)
        self._lives = [Life(worker_id, 1, 1) for worker_id in self.candidates]
        self._slots: list[int] = []
        self._num_batches = [0] * num_workers

    async def begin(self) -> None:
        """Takes a slot for each worker."""
        for life in self._lives:
            slot = await self._store.begin(life)
            assert slot is not None
            self._slots.append(slot)

    async def write(self, blocks: list[list[bytes]], is_stored: bool) -> int:
        """Stores or removes `blocks[worker]`. Returns the number of entries."""
        for start in range(0, max(map(len, blocks)), BATCH_BLOCKS):
            for worker, hashes in enumerate(blocks):
                batch = dict.fromkeys(hashes[start : start + BATCH_BLOCKS], is_stored)
                if batch:
                    await self._write_batch(worker, batch)
        return sum(map(len, blocks))

    async def _write_batch(self, worker: int, batch: dict[bytes, bool]) -> None:
        done = self._num_batches[worker]
        self._num_batches[worker] += 1
        life, slot = self._lives[worker], self._slots[worker]
        assert await self._store.write(slot, life, (done, done + 1), batch)


def _hashes(count: int, rng: random.Random) -> list[bytes]:
    return [rng.randbytes(HASH_BYTES) for _ in range(count)]
