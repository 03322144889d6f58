"""Messages between workers, and from workers to the router, that get lost or come twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest

from core.errors import Unavailable
from tests.engine.harness import make_prompt
from tests.faults.stack import FAILED, FaultStack, fault_stack

pytestmark = pytest.mark.e2e

SENDERS = {
    "Grant": "prefill-0",
    "Announce": "prefill-0",
    "Handshake": "decode-0",
    "Renew": "decode-0",
    "Release": "decode-0",
}
FAULTS = [
    ("before", "drop"),
    ("before", "duplicate"),
    ("before", "delay"),
    ("after", "drop"),
    pytest.param("after", "delay", marks=pytest.mark.slow),
]
LEASE = ("--lease-s", "3")
RENEWS_TWICE_S = 2.3
"""Decode renews the lease every second, and a busy machine loses none."""
seeds = count()


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    chunks = ("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "64")
    args = ("--dtype", "float32", *chunks, *LEASE)
    with fault_stack(tiny("llama"), worker_args=args) as stack:
        yield stack


def forget_the_handshake(stack: FaultStack) -> None:
    """Decode has to greet prefill anew."""
    stack.workers["prefill-0"].kill()
    stack.restart("prefill-0")


@pytest.mark.parametrize(("when", "action"), FAULTS)
@pytest.mark.parametrize("message", [name for name in SENDERS if name != "Handshake"])
def test_a_message_that_is_lost_late_or_repeated_costs_time_and_nothing_else(
    stack: FaultStack, message: str, when: str, action: str
) -> None:
    check_message(stack, message, when, action)


@pytest.mark.slow
@pytest.mark.parametrize(("when", "action"), FAULTS)
def test_a_handshake_that_is_lost_late_or_repeated_costs_time_and_nothing_else(
    stack: FaultStack, when: str, action: str
) -> None:
    forget_the_handshake(stack)
    check_message(stack, "Handshake", when, action)


def check_message(stack: FaultStack, message: str, when: str, action: str) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    faults = stack.faults[SENDERS[message]]
    reading_s = RENEWS_TWICE_S if message == "Renew" else 0.1
    with (
        stack.faults["decode-0"].rule("pull:before", "delay", times=1, seconds=reading_s),
        faults.rule(f"{message}:{when}", action, times=1, seconds=0.3) as fault,
    ):
        answer = stack.ask(prompt, 20)
        fault.wait()
    assert answer.token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


@pytest.mark.parametrize(("when", "action"), FAULTS)
def test_a_revocation_that_is_lost_late_or_repeated_costs_time_and_nothing_else(
    stack: FaultStack, when: str, action: str
) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    # Lost for good, since a message that is lost once is said again.
    times = 0 if action == "drop" else 1
    faults = stack.faults["prefill-0"]
    with faults.rule(f"Revoke:{when}", action, times=times, seconds=0.3) as fault:
        # With one token there is nothing to hand off.
        assert stack.ask(prompt, 1).token_ids == stack.reference(prompt, 1)
        fault.wait()
    stack.check_recovered()


@pytest.mark.parametrize("message", ["Grant", "Announce", "Release"])
def test_messages_that_never_get_through_end_in_a_clear_error(
    stack: FaultStack, message: str
) -> None:
    faults = stack.faults[SENDERS[message]]
    with faults.rule(f"{message}:before", "drop"), pytest.raises(Unavailable, match=FAILED):
        stack.ask(make_prompt(150, seed=100 + next(seeds)), 20)
    assert "a fault" in stack.router.log()
    stack.check_recovered()


def test_prefills_first_token_may_be_lost_or_come_twice(stack: FaultStack) -> None:
    for action in ("drop", "duplicate"):
        prompt = make_prompt(150, seed=100 + next(seeds))
        stack.faults["prefill-0"].arm("output", action)
        assert stack.ask(prompt, 20).token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_decodes_tokens_may_come_twice(stack: FaultStack) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    with stack.faults["decode-0"].rule("output", "duplicate"):
        assert stack.ask(prompt, 20).token_ids == stack.reference(prompt, 20)
    stack.check_recovered()


def test_a_block_damaged_on_its_way_is_noticed_and_fetched_again(stack: FaultStack) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    stack.faults["decode-0"].arm("pull:after", "corrupt")
    answer = stack.ask(prompt, 20)
    assert answer.token_ids == stack.reference(prompt, 20)
    assert answer.route.attempts == 2
    # Neither side has kept what it did not trust.
    again = stack.ask([*prompt, 7], 20)
    assert again.token_ids == stack.reference([*prompt, 7], 20)
    stack.check_recovered()


def test_when_prefill_takes_back_what_decode_is_giving_up_the_router_still_hears_of_it(
    stack: FaultStack,
) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    prefill, decode = stack.faults["prefill-0"], stack.faults["decode-0"]
    with (
        prefill.rule("Revoke:after", "note") as revoked,
        prefill.hold("step", skip=1) as computing,
        decode.hold("Release:after") as releasing,
    ):
        decode.arm("pull:after", "corrupt")
        answer = stack.begin(prompt, 20)
        computing.wait()
        releasing.wait()
        revoked.wait()
    assert answer.result().token_ids == stack.reference(prompt, 20)
    assert answer.result().route.attempts == 2
    stack.check_recovered()


def test_blocks_that_are_always_damaged_end_in_a_clear_error(stack: FaultStack) -> None:
    prompt = make_prompt(150, seed=100 + next(seeds))
    with (
        stack.faults["decode-0"].rule("pull:after", "corrupt"),
        pytest.raises(Unavailable, match=FAILED),
    ):
        stack.ask(prompt, 20)
    reason = r"did not arrive as it was computed|gave the hand-off up"
    assert re.search(reason, stack.router.log())
    assert stack.ask(prompt, 20).token_ids == stack.reference(prompt, 20)
    stack.check_recovered()
