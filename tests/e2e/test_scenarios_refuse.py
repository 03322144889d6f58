"""One side refuses or fails a request: the other learns it at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.errors import InternalError, InvalidArgument, TransferError, Unavailable
from tests.engine.harness import make_prompt
from tests.faults.dispatcher import Dispatcher, make_dispatch
from tests.faults.stack import FAILED, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

AT_ONCE_S = 20.0
"""Far less than the lease (60 s) and decode's patience with prefill (120 s)."""
PREFILL = ("--max-num-batched-tokens", "64", "--lease-s", "60")


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    small_decode = ("--num-gpu-blocks-override", "20")
    with fault_stack(tiny("llama"), prefill_args=PREFILL, decode_args=small_decode) as stack:
        yield stack


def test_a_prompt_too_long_for_decodes_pool_never_reaches_a_worker(stack: FaultStack) -> None:
    with stack.faults["prefill-0"].rule("step", "note") as step:
        with pytest.raises(InvalidArgument, match="320"):
            stack.ask(make_prompt(330), 5)
        assert step.num_reached == 0
    stack.check_recovered()


def test_a_request_that_decode_refuses_ends_at_prefill_at_once(stack: FaultStack) -> None:
    with Dispatcher(stack) as dispatcher:
        dispatch = make_dispatch(make_prompt(330), "long")
        with pytest.raises(InvalidArgument) as caught:
            dispatcher.decode(dispatch, "prefill-0", "decode-0")
        assert caught.value.field == "prompt_token_ids"
        dispatcher.prefill(dispatch, "prefill-0", "decode-0")
        assert isinstance(dispatcher.error_of(dispatch, AT_ONCE_S), Unavailable)
        stack.check_idle(AT_ONCE_S)
    stack.check_recovered()


def test_when_decode_cannot_read_after_prefill_is_done_prefill_is_freed_at_once(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(150, seed=1)
    with stack.faults["decode-0"].rule("pull:before", "fail", times=2) as refused:
        answer = stack.ask(prompt, 20)
        refused.wait(times=2)
    assert answer.token_ids == stack.reference(prompt, 20)
    assert answer.route.attempts == 3
    stack.check_idle(AT_ONCE_S)
    stack.check_recovered()


def test_when_decode_can_never_read_the_client_gets_a_clear_error(stack: FaultStack) -> None:
    with (
        stack.faults["decode-0"].rule("pull:before", "fail"),
        pytest.raises(Unavailable, match=FAILED),
    ):
        stack.ask(make_prompt(150, seed=2), 20)
    assert "the read was refused" in stack.router.log()
    stack.check_idle(AT_ONCE_S)
    stack.check_recovered()


def test_a_read_that_breaks_off_in_the_middle_is_not_used(stack: FaultStack) -> None:
    prompt = make_prompt(150, seed=3)
    with stack.faults["decode-0"].rule("pull:during", "fail", times=1):
        answer = stack.ask(prompt, 20)
    assert answer.token_ids == stack.reference(prompt, 20)
    assert answer.route.attempts == 2
    stack.check_recovered()


@pytest.mark.parametrize("num_steps", [0, 2])
def test_when_prefills_device_fails_decode_generates_nothing_and_waits_for_nothing(
    stack: FaultStack, num_steps: int
) -> None:
    prompt = make_prompt(200, seed=4 + num_steps)  # four steps; decode reads as they end
    fault = stack.faults["prefill-0"].arm("step", "fail", skip=num_steps)
    with (
        stack.faults["decode-0"].rule("step", "note") as step,
        pytest.raises(InternalError, match="the device is lost"),
    ):
        stack.ask(prompt, 20)
    fault.wait()
    assert step.num_reached == 0
    stack.check_idle(AT_ONCE_S)
    stack.check_recovered()


def test_when_decodes_device_fails_both_are_freed_at_once(stack: FaultStack) -> None:
    stack.faults["decode-0"].arm("step", "fail", skip=3)
    with pytest.raises(InternalError, match="the device is lost"):
        stack.ask(make_prompt(100, seed=7), 20)
    stack.check_idle(AT_ONCE_S)
    stack.check_recovered()


def test_a_dispatch_for_a_former_life_is_refused_by_both_sides(stack: FaultStack) -> None:
    with Dispatcher(stack) as dispatcher:
        dispatcher.addresses["prefill-0"].epoch -= 1
        dispatch = make_dispatch(make_prompt(50), "former")
        with pytest.raises(Unavailable, match="restarted"):
            dispatcher.decode(dispatch, "prefill-0", "decode-0")
    with Dispatcher(stack) as dispatcher:
        dispatcher.decode(dispatch, "prefill-0", "decode-0")
        dispatcher.addresses["decode-0"].epoch -= 1
        dispatcher.prefill(dispatch, "prefill-0", "decode-0")
        assert dispatcher.error_of(dispatch, AT_ONCE_S)
    stack.check_recovered()


def test_prefill_alone_cannot_hand_anything_off(stack: FaultStack) -> None:
    with Dispatcher(stack) as dispatcher:
        dispatch = make_dispatch(make_prompt(50), "alone")
        dispatcher.prefill(dispatch, "prefill-0", "decode-0")
        # Decode waits a while for the dispatch, of which prefill may be the first to hear.
        error = dispatcher.error_of(dispatch, 2 * AT_ONCE_S)
        assert isinstance(error, Unavailable | TransferError)
        assert "not known" in error.message
    stack.check_recovered()
