"""Two routers over the same workers, without a leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.pods import PodStack, pod_stack
from client import BatonClient, Completion
from client.launch_plan import UpConfig
from tests.e2e.conftest import Reference
from tests.engine.harness import make_prompt
from tests.faults.control import eventually

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 40
LEAST_SHARE = 4
"""Of 40 requests, over two workers. If they do not come at once, chance decides: fewer once in
50,000,000 runs."""
NUM_OUTPUTS = 12
WORKER_ARGS = ("--dtype", "float32", "--num-gpu-blocks-override", "512")


@pytest.fixture
def stack(tiny, tmp_path: Path) -> Iterator[PodStack]:  # type: ignore[no-untyped-def]
    config = UpConfig(
        model=str(tiny("llama")[0]),
        num_prefill=2,
        num_decode=2,
        worker_args=WORKER_ARGS,
        router_args=("--local-prefill-max-tokens", "0", "--worker-poll-s", "0.2"),
    )
    with pod_stack(config, tmp_path) as running:
        yield running


def ask(address: str, seed: int, length: int = 30) -> Completion:
    with BatonClient(address) as client:
        return client.generate(
            token_ids=make_prompt(length, seed),
            max_tokens=NUM_OUTPUTS,
            temperature=0.0,
            ignore_eos=True,
        )


def are_attached(address: str) -> bool:
    with BatonClient(address) as client:
        return len(client.status().workers) == 4


def check_right(answers: dict[int, Completion], reference: Reference) -> None:
    for seed, answer in answers.items():
        assert answer.token_ids == reference(make_prompt(30, seed), NUM_OUTPUTS)


def test_two_routers_share_the_workers_and_one_goes_on_alone(stack: PodStack, tiny) -> None:  # type: ignore[no-untyped-def]
    reference = tiny("llama")[1]
    other = stack.add_router()
    assert eventually(lambda: are_attached(other))
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        addresses = [stack.address, other] * (NUM_REQUESTS // 2)
        crowd = dict(enumerate(threads.map(ask, addresses, range(NUM_REQUESTS))))
    check_right(crowd, reference)
    for role in ("prefill", "decode"):
        taken = Counter(getattr(answer.route, f"{role}_worker") for answer in crowd.values())
        assert min(taken[f"{role}-0"], taken[f"{role}-1"]) >= LEAST_SHARE, taken
    assert stack.wait_idle() == []

    with ThreadPoolExecutor(8) as threads:
        cut_off = [threads.submit(ask, stack.address, 100 + seed, 60) for seed in range(4)]
        going_on = [threads.submit(ask, other, 200 + seed) for seed in range(4)]
        stack.router.kill()
        check_right({200 + seed: task.result() for seed, task in enumerate(going_on)}, reference)
        for task in cut_off:
            task.exception()
    check_right({300 + seed: ask(other, 300 + seed) for seed in range(8)}, reference)
    stack.router.start()
    stack.router.wait_ready()
    assert stack.wait_idle() == []
