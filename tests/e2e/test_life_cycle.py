"""Start, stop, clients that leave, and parts that die."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from core.errors import DeadlineExceeded
from tests.e2e.conftest import Reference
from tests.e2e.stack import RunningStack, quiet_env, running_stack
from tests.engine.harness import make_prompt

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[tuple[RunningStack, Reference]]:  # type: ignore[no-untyped-def]
    folder, reference = tiny("llama")
    with running_stack(folder, "--decode-args=--num-gpu-blocks-override 80") as stack:
        yield stack, reference


def check_next(stack: RunningStack, reference: Reference) -> None:
    """All is idle again, and the next requests are right."""
    stack.wait_until_idle()
    for seed in range(5):
        prompt = make_prompt(30 + seed, seed)
        assert stack.greedy(prompt, 12).token_ids == reference(prompt, 12)


@pytest.mark.parametrize("num_chunks", [0, 1, 5])
def test_a_client_that_cancels_frees_everything(
    served: tuple[RunningStack, Reference], num_chunks: int
) -> None:
    stack, reference = served
    with stack.client() as client:
        for seed in range(8):
            prompt = make_prompt(100, seed)
            with client.stream(token_ids=prompt, max_tokens=400, ignore_eos=True) as stream:
                for _ in range(num_chunks):
                    next(stream)
    check_next(stack, reference)


CONNECT_AND_HANG = """
import sys, grpc
from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[1]))
calls = [
    stub.Generate(
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=range(i, 60 + i)),
            sampling=types_pb2.SamplingParams(max_tokens=400, ignore_eos=True),
        )
    )
    for i in range(8)
]
if sys.argv[2] == "streaming":
    next(calls[0])
print("sent", flush=True)
input()
"""


@pytest.mark.parametrize("phase", ["sent", "streaming"])
def test_a_client_that_is_killed_frees_everything(
    served: tuple[RunningStack, Reference], phase: str
) -> None:
    stack, reference = served
    process = subprocess.Popen(
        [sys.executable, "-c", CONNECT_AND_HANG, stack.address, phase],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=quiet_env(),
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    check_next(stack, reference)


def test_a_deadline_ends_the_request_and_frees_everything(
    served: tuple[RunningStack, Reference],
) -> None:
    stack, reference = served
    with stack.client() as client, pytest.raises(DeadlineExceeded):
        client.generate(token_ids=make_prompt(50), max_tokens=450, ignore_eos=True, timeout_s=0.05)
    check_next(stack, reference)


def test_two_calls_with_one_id_compute_once_and_get_the_same_tokens(
    served: tuple[RunningStack, Reference],
) -> None:
    stack, reference = served
    prompt = make_prompt(45)
    answers = []

    def call() -> None:
        answers.append(stack.greedy(prompt, 40, request_id="same"))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.token_ids for a in answers] == [reference(prompt, 40)] * 3
    assert len({a.timing for a in answers}) == 1


def test_generation_goes_on_while_redis_is_away(tiny) -> None:  # type: ignore[no-untyped-def]
    folder, reference = tiny("llama")
    with running_stack(folder) as stack:
        check_next(stack, reference)
        redis = stack.children()["redis"]
        redis.suspend()
        for seed in range(5):
            prompt = make_prompt(60, seed)
            assert stack.greedy(prompt, 12).token_ids == reference(prompt, 12)
        redis.resume()
        redis.kill()
        time.sleep(6)  # longer than the registry's lease
        check_next(stack, reference)


def test_a_stack_whose_router_is_killed_ends_by_itself(tiny) -> None:  # type: ignore[no-untyped-def]
    folder, _ = tiny("llama")
    with running_stack(folder) as stack:
        children = stack.children()
        with grpc.insecure_channel(stack.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            sampling = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
            ids = inference_pb2.TokenIds(ids=make_prompt(50))
            # So that the answer cannot be there before the router is gone.
            children["decode-0"].suspend()
            call = stub.Generate(inference_pb2.GenerateRequest(token_ids=ids, sampling=sampling))
            children["router"].kill()
            with pytest.raises(grpc.RpcError):
                list(call)
        # Without its router the stack ends by itself, and says so.
        assert stack.process.wait(timeout=30) == 1


def test_ctrl_c_stops_everything(tiny) -> None:  # type: ignore[no-untyped-def]
    folder, _ = tiny("llama")
    with running_stack(folder) as stack:
        children = stack.children()
        assert set(children) == {"redis", "prefill-0", "decode-0", "router"}
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(timeout=30) == 0
    assert [c for c in children.values() if c.is_running()] == []


def test_no_process_outlives_a_launcher_that_is_killed(tiny) -> None:  # type: ignore[no-untyped-def]
    folder, _ = tiny("llama")
    with running_stack(folder) as stack:
        children = list(stack.children().values())
        stack.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []
