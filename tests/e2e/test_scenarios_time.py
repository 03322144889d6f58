"""Leases that run out, and transfers that never end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import Unavailable
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.stack import FAILED, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

SHORT_LEASE = ("--lease-s", "0.05", "--max-lease-s", "1")
"""Decode renews in time, but not beyond a second; so a busy machine loses no lease in between."""
POOL = ("--dtype", "float32", "--num-gpu-blocks-override", "24")


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), worker_args=(*POOL, *SHORT_LEASE)) as stack:
        yield stack


def test_reads_that_come_after_their_lease_are_never_served(stack: FaultStack) -> None:
    prompts = [make_prompt(30 + index, seed=5) for index in range(40)]
    with stack.faults["decode-0"].rule("pull:before", "delay", times=12, seconds=2) as late:
        answers = [stack.begin(prompt, 10) for prompt in prompts]
        wait(answers)
        late.wait(times=12)
    num_right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.exception() is None:
            assert answer.result().token_ids == stack.reference(prompt, 10)
            num_right += 1
        else:
            assert isinstance(answer.exception(), Unavailable)
    assert num_right >= 28
    stack.check_recovered()


def test_when_every_read_is_late_every_request_gets_a_clear_error(stack: FaultStack) -> None:
    with stack.faults["decode-0"].rule("pull:before", "delay", seconds=2):
        answers = [stack.begin(make_prompt(40, seed), 10) for seed in range(6)]
        for answer in answers:
            with pytest.raises(Unavailable, match=FAILED):
                answer.result()
    assert "lease" in stack.router.log()
    stack.check_recovered()


def test_dead_transfers_are_freed_without_any_traffic(tiny) -> None:  # type: ignore[no-untyped-def]
    short = ("--lease-s", "1")
    with fault_stack(tiny("llama"), prefill_args=short) as stack:
        address = stack.worker_status("prefill-0").address
        with stack.faults["decode-0"].hold("pull:before", times=0) as fault:
            answers = [stack.begin(make_prompt(60, seed), 10) for seed in range(6)]
            fault.wait(times=6)
            # Nobody is left who could tell prefill.
            stack.router.kill()
            stack.workers["decode-0"].kill()
        assert eventually(lambda: load_of(address).exports == 0)
        blocks = load_of(address).blocks
        assert blocks.free + blocks.cached == blocks.total
        wait(answers)
        stack.router.start()
        stack.restart("decode-0")
        stack.check_recovered()


def test_a_pool_that_dead_reads_have_eaten_up_is_not_healthy(tiny) -> None:  # type: ignore[no-untyped-def]
    with fault_stack(tiny("llama"), num_decode=2, worker_args=POOL) as stack:
        with stack.hold_any("decode", "pull:during") as fault:
            with (
                stack.client() as client,
                client.stream(token_ids=make_prompt(250), max_tokens=5, ignore_eos=True),
            ):
                name = fault.wait()
            # 16 of 24 blocks wait for a read that does not settle.
            address = stack.worker_status(name).address
            assert eventually(lambda: health_of(address) != SERVING)
            assert stack.worker_status(name).state != types_pb2.WORKER_STATE_READY
            prompts = [make_prompt(40, seed) for seed in range(8)]
            stack.check_right([(prompt, 10) for prompt in prompts])
            assert eventually(lambda: not stack.workers[name].is_running)
        stack.restart(name)
        stack.check_recovered()


@pytest.mark.parametrize("signal", ["resume", pytest.param("kill", marks=pytest.mark.slow)])
def test_a_read_from_a_stopped_worker_keeps_its_blocks_from_others_until_that_moves_or_dies(
    tiny,  # type: ignore[no-untyped-def]
    signal: str,
) -> None:
    # Without shared memory a read needs the owner's help, so a stopped owner stalls it.
    env = {"UCX_TLS": "tcp,self"}
    with fault_stack(tiny("llama"), num_prefill=2, kv_transport="nixl", env=env) as stack:
        stack.check_recovered()
        prompt = make_prompt(100, seed=8)
        with stack.faults["decode-0"].hold("pull:before") as reading:
            answer = stack.begin(prompt, 20)
            reading.wait()
            name = stack.exporter()
            stack.workers[name].suspend()
        assert answer.result().token_ids == stack.reference(prompt, 20)
        assert answer.result().route.prefill_worker != name
        assert eventually(lambda: num_quarantined(stack) == 7)
        stack.check_right([(make_prompt(90, seed), 20) for seed in range(12)])
        assert num_quarantined(stack) == 7
        getattr(stack.workers[name], signal)()
        assert eventually(lambda: num_quarantined(stack) == 0)
        if signal == "kill":
            stack.restart(name)
        stack.wait_usable(name)
        stack.check_recovered()


def num_quarantined(stack: FaultStack) -> int:
    return stack.worker_status("decode-0").load.blocks.quarantined


SERVING = health_pb2.HealthCheckResponse.SERVING


def health_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest()
            return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
        except grpc.RpcError:
            return health_pb2.HealthCheckResponse.UNKNOWN


def load_of(address: str) -> types_pb2.Load:
    """What a worker says of itself without a router."""
    with grpc.insecure_channel(address) as channel:
        request = worker_pb2.WorkerStatusRequest()
        return worker_pb2_grpc.WorkerStub(channel).GetWorkerStatus(request, timeout=5).load
