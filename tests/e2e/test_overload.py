"""Three times the capacity on real processes, in short: nothing leaks, nobody waits in vain.

Times are compared with generous room, since machines that run tests are busy: `bench.overload`
has the figures.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.overload import MODEL, RECOVERY_S, SHARES, measure_capacity, recovery_s, tenants
from bench.overload_load import Load, Shot, quantile
from bench.pods import PodStack, pod_stack
from bench.random_model import write_random_model
from client.launch_plan import UpConfig
from core.errors import BatonError
from core.rpc import open_channel

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LOAD_S = 6.0
# Far below what three times the capacity would wait, far above what one request takes.
TTFT_LIMIT_S = 2.0
REFUSED_WITHIN_S = 0.5
"""Beyond a call that asks for nothing."""


@dataclass(frozen=True)
class Seen:
    """By the clients. `bare_s`: what calls took that ask for nothing, during the load."""

    shots: list[Shot]
    bare_s: list[float]
    recovered_s: float


async def overload(stack: PodStack) -> Seen:
    async with open_channel(stack.address) as channel:
        load = Load(channel, random.Random(0))
        capacity = await measure_capacity(load, seconds=3.0)
        calling = asyncio.create_task(load.bare_calls())
        shots = await load.offer(dict.fromkeys(SHARES, capacity.requests_per_s), LOAD_S)
        calling.cancel()
        return Seen(shots, await calling, await recovery_s(load, capacity))


def test_an_overloaded_stack_serves_whom_it_admits_and_ends_idle(tmp_path: Path) -> None:
    path, model = tmp_path / "tenants.yaml", tmp_path / "model"
    path.write_text(tenants(dict.fromkeys(SHARES, TTFT_LIMIT_S)))
    model.mkdir()
    write_random_model(model, MODEL, seed=0)
    config = UpConfig(
        model=str(model),
        worker_args=("--num-gpu-blocks-override", "128"),
        router_args=("--tenants", str(path)),
    )
    with pod_stack(config, tmp_path) as stack:
        seen = asyncio.run(overload(stack))
        assert stack.wait_idle() == []
    assert seen.recovered_s <= RECOVERY_S
    # Without a share, one that waits may be overtaken until it is refused.
    refused = [shot for shot in seen.shots if shot.is_refused and SHARES[shot.class_name]]
    check_refusals(refused, seen.bare_s)
    served = [shot for shot in seen.shots if not shot.is_refused]
    assert [shot.error for shot in served if shot.error] == []
    names = [shot.class_name for shot in served]
    assert names.count("gold") > names.count("bronze")
    promised = [shot for shot in served if SHARES[shot.class_name]]
    num_late = sum((shot.ttft_s or 0.0) > TTFT_LIMIT_S for shot in promised)
    assert num_late <= 0.05 * len(promised) + 1


def check_refusals(refused: list[Shot], bare_s: list[float]) -> None:
    """At once, and with a time to come back."""
    assert refused, "three times the capacity cannot all be served in time"
    errors = [shot.error for shot in refused]
    assert all(isinstance(error, BatonError) and error.retry_after_s > 0 for error in errors)
    limit_s = quantile(bare_s, 0.95) + REFUSED_WITHIN_S
    num_slow = sum((shot.total_s or 0.0) > limit_s for shot in refused)
    assert num_slow <= 0.05 * len(refused) + 1
