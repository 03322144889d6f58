"""Plans of stacks whose services are fakes."""

from __future__ import annotations

import sys

from client.launch_plan import LaunchPlan
from client.processes import ProcessSpec


def fake_service(name: str, *flags: str) -> ProcessSpec:
    """A process that follows `flags` (see fake_service.py)."""
    return ProcessSpec(name, (sys.executable, "-m", "tests.client.fake_service", *flags))


def fake_plan(router: list[str] | None = None, *workers: list[str]) -> LaunchPlan:
    """One router, and as many workers as flag lists; the first one is called prefill-0."""
    specs = [fake_service(f"prefill-{index}", *flags) for index, flags in enumerate(workers)]
    return LaunchPlan(
        router=fake_service("router", *(router or ["--router-of", str(len(workers))])),
        others=tuple(specs),
        prefill_ids=tuple(f"worker-{index}" for index in range(len(workers))),
        decode_ids=(),
    )
