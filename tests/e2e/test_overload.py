"""Three times the capacity on real processes, in short: nothing leaks, nobody waits in vain."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from bench.overload import MODEL, SHARES, measure_capacity, tenants
from bench.overload_load import Load, Shot
from bench.pods import PodStack, pod_stack
from bench.random_model import write_random_model
from client.launch_plan import UpConfig
from core.errors import BatonError
from core.rpc import open_channel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LOAD_S = 6.0


async def overload(stack: PodStack) -> list[Shot]:
    async with open_channel(stack.address) as channel:
        load = Load(channel, random.Random(0))
        capacity = await measure_capacity(load, seconds=3.0)
        return await load.offer(dict.fromkeys(SHARES, capacity.requests_per_s), LOAD_S)


def test_an_overloaded_stack_serves_whom_it_admits_and_ends_idle(tmp_path: Path) -> None:
    path, model = tmp_path / "tenants.yaml", tmp_path / "model"
    # Far below what three times the capacity would wait, far above what one request takes.
    path.write_text(tenants(dict.fromkeys(SHARES, 2.0)))
    model.mkdir()
    write_random_model(model, MODEL, seed=0)
    config = UpConfig(
        model=str(model),
        worker_args=("--num-gpu-blocks-override", "128"),
        router_args=("--tenants", str(path)),
    )
    with pod_stack(config, tmp_path) as stack:
        shots = asyncio.run(overload(stack))
        assert stack.wait_idle() == []
    refused = [shot.error for shot in shots if shot.is_refused]
    assert refused, "three times the capacity cannot all be served in time"
    assert all(isinstance(error, BatonError) and error.retry_after_s > 0 for error in refused)
    assert [shot.error for shot in shots if shot.error and not shot.is_refused] == []
    served = [shot.class_name for shot in shots if not shot.is_refused]
    assert served.count("gold") > served.count("bronze")
