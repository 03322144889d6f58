"""What follows from a worker's settings."""

from __future__ import annotations

import pytest

from kvtransfer.digests import DigestPlan
from worker.settings import WorkerSettings


def settings(**values: object) -> WorkerSettings:
    return WorkerSettings(model="m", worker_id="w", **values)  # type: ignore[arg-type]


def test_a_gpu_plans_ahead_and_verifies_some_blocks_a_cpu_does_not_and_verifies_all() -> None:
    cpu, gpu = settings(), settings(device="cuda")
    assert (cpu.schedules_ahead, gpu.schedules_ahead) == (False, True)
    assert (cpu.digest_plan().every, gpu.digest_plan().every) == (1, 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_said_counts(device: str) -> None:
    said = settings(device=device, async_scheduling=True, kv_verify="off")
    assert said.schedules_ahead and said.digest_plan() == DigestPlan()
    assert not settings(device=device, async_scheduling=False).schedules_ahead


def test_the_environment_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ASYNC_SCHEDULING", "1")
    assert settings().schedules_ahead


def test_over_many_requests_every_block_has_its_turn_to_be_sampled() -> None:
    sampled = settings(kv_verify="sampled")
    assert {sampled.digest_plan().offset for _ in range(2000)} == set(range(8))
