"""Batches that sequences join and leave, and workers that do not fit together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import FailedPrecondition
from tests import tiny_models
from tests.engine.harness import make_prompt
from tests.faults.control import eventually
from tests.faults.dispatcher import Dispatcher, make_dispatch
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e

MISFITS = {
    "decode-1": ("block_size: own 32, peer 16", "--block-size", "32"),
    "decode-2": ("dtype: own 'bfloat16', peer 'float32'", "--dtype", "bfloat16"),
}


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    extra = {name: args for name, (_, *args) in MISFITS.items()}
    with fault_stack(tiny("llama"), num_prefill=1, num_decode=3, extra=extra) as stack:
        yield stack


def test_sequences_that_join_and_leave_a_running_batch_of_any_size_are_right(
    stack: FaultStack,
) -> None:
    requests = [(make_prompt(5 + 11 * index), 40 - 3 * index) for index in range(12)]
    answers = []
    for prompt, num_outputs in requests:
        answers.append(stack.begin(prompt, num_outputs))
        time.sleep(0.01)
    for (prompt, num_outputs), answer in zip(requests, answers, strict=True):
        assert answer.result().token_ids == stack.reference(prompt, num_outputs)
        assert answer.result().route.decode_worker == "decode-0"
    for worker in ("decode-1", "decode-2"):
        assert stack.worker_status(worker).load.running == 0


@pytest.mark.parametrize("name", MISFITS)
def test_a_worker_that_does_not_fit_is_refused_with_both_values(
    stack: FaultStack, name: str
) -> None:
    difference = MISFITS[name][0]
    with Dispatcher(stack) as dispatcher:
        dispatch = make_dispatch(make_prompt(20), f"misfit-{name}")
        with pytest.raises(FailedPrecondition) as caught:
            dispatcher.decode(dispatch, "prefill-0", name)
    # Prefill refuses, so its own values come first.
    own, peer = difference.split(", peer ")
    field, own = own.split(": own ")
    assert f"{field}: own {peer}, peer {own}" in caught.value.message
    stack.check_recovered()


def test_the_router_names_what_does_not_fit(stack: FaultStack) -> None:
    assert eventually(lambda: "block_size: own 16, peer 32" in stack.router.log())
    assert eventually(lambda: "dtype: own 'float32', peer 'bfloat16'" in stack.router.log())


def test_a_worker_of_another_model_is_refused(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tiny_models.build(tmp_path / "other", "llama", seed=1)
    extra = {"decode-1": ("--model", str(other))}
    with fault_stack(tiny("llama"), num_decode=2, extra=extra, unfit=["decode-1"]) as stack:
        for seed in range(8):
            answer = stack.ask(make_prompt(30, seed), 10)
            assert answer.token_ids == stack.reference(make_prompt(30, seed), 10)
            assert answer.route.decode_worker == "decode-0"
        assert eventually(lambda: "another model" in stack.router.log())
