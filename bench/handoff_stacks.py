"""The stacks that bench.handoff compares: one prefill and one decode worker, a core each."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kv_ways import Way, ready_way
from bench.limited_prefill import LINK_BITS_PER_S
from client import AsyncBatonClient
from client.launch_plan import LaunchPlan, UpConfig, make_plan
from client.launcher import Stack
from engine.model_config import ModelConfig

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4352
BYTES_PER_ELEMENT = 4
NUM_SERIAL_READS = 5


@dataclass(frozen=True)
class Link:
    """What KV moves over."""

    name: str
    way: Way


SHARED_MEMORY = Link("shared memory", Way("nixl", "nixl"))
GIGABIT = Link("1 Gbit/s", Way("tcp", "tcp", bits_per_s=LINK_BITS_PER_S))


@dataclass(frozen=True)
class Model:
    """A model folder, run in float32."""

    name: str
    folder: Path

    @property
    def block_bytes(self) -> int:
        config = ModelConfig.from_folder(self.folder)
        per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
        return BLOCK_SIZE * per_token * BYTES_PER_ELEMENT

    @property
    def vocab_size(self) -> int:
        return ModelConfig.from_folder(self.folder).vocab_size


@asynccontextmanager
async def serving(
    model: Model, link: Link, worker_flags: tuple[str, ...], local_prefill: int = 0
) -> AsyncIterator[AsyncBatonClient]:
    """A client of a stack that serves `model`. Raises StartupError.

    Prompts of up to `local_prefill` tokens stay on decode; at 0 all are handed off.
    """
    pool_bytes = 2 * MAX_MODEL_LEN // BLOCK_SIZE * model.block_bytes
    flags = ["--dtype", "float32", "--block-size", str(BLOCK_SIZE)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", str(pool_bytes)]
    config = UpConfig(
        model=str(model.folder),
        port=0,
        kv_transport=link.way.transport,
        threads_per_worker=1,
        worker_args=(*flags, *worker_flags),
        router_args=("--local-prefill-max-tokens", str(local_prefill)),
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        plan = make_plan(config, Path(folder))
        if link.way.bits_per_s is not None:
            plan = _with_limited_prefill(plan)
        stack = Stack(plan, Path(folder), lambda line: None)
        try:
            ready = await stack.start()
            async with AsyncBatonClient(ready.address) as client:
                yield client
        finally:
            await stack.stop()


def serial_transfer_s(model: Model, link: Link, num_tokens: int) -> float:
    """How long the KV of a prompt takes over a link when it moves alone and in one piece: the
    least of some reads."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    with ready_way(link.way, (num_blocks, model.block_bytes)) as ready:
        return min(ready.turn(num_blocks).pull_s for _ in range(NUM_SERIAL_READS))


def _with_limited_prefill(plan: LaunchPlan) -> LaunchPlan:
    def limited(argument: str) -> str:
        return "bench.limited_prefill" if argument == "prefill_svc" else argument

    others = [
        dataclasses.replace(spec, argv=tuple(map(limited, spec.argv))) for spec in plan.others
    ]
    return dataclasses.replace(plan, others=tuple(others))
