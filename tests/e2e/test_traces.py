"""Traces of requests through a whole stack, as a collector gets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.e2e.otlp_receiver import Receiver, otlp_receiver
from tests.e2e.stack import RunningStack, running_stack
from tests.engine.harness import make_prompt
from tests.traces import CALLER, CALLER_ID

pytestmark = pytest.mark.e2e

NUM_OUTPUTS = 8
SPANS = {
    "text_completion llama": ("baton-router", ""),
    "router.admission": ("baton-router", "text_completion llama"),
    "router.placement": ("baton-router", "text_completion llama"),
    "router.attempt": ("baton-router", "text_completion llama"),
    "prefill": ("baton-prefill", "router.attempt"),
    "prefill.queue": ("baton-prefill", "prefill"),
    "prefill.compute": ("baton-prefill", "prefill"),
    "prefill.export": ("baton-prefill", "prefill"),
    "decode": ("baton-decode", "router.attempt"),
    "decode.wait": ("baton-decode", "decode"),
    "decode.transfer": ("baton-decode", "decode"),
    "decode.generate": ("baton-decode", "decode"),
}
"""Of a request that is handed off: who sends each, and its parent."""


@pytest.fixture(scope="module")
def model(tiny) -> tuple[Path, Reference]:  # type: ignore[no-untyped-def]
    return tiny("llama")


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def stack(model: tuple[Path, Reference], receiver: Receiver) -> Iterator[RunningStack]:
    env = {
        "BATON_OTLP_TRACES_ENDPOINT": receiver.url,
        "BATON_TRACES_SAMPLING_RATIO": "0",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with running_stack(model[0], "--dtype", "float32", env=env) as running:
        yield running


def caller(trace_id: str, flags: str = "01") -> str:
    """A traceparent."""
    return f"00-{trace_id}-{CALLER_ID}-{flags}"


def test_a_request_is_one_trace_through_router_prefill_transfer_and_decode(
    stack: RunningStack, model: tuple[Path, Reference], receiver: Receiver
) -> None:
    prompt, trace_id = make_prompt(40, seed=1), "1" * 32
    answer = stack.greedy(prompt, NUM_OUTPUTS, traceparent=caller(trace_id))
    assert answer.token_ids == model[1](prompt, NUM_OUTPUTS)
    receiver.wait_for(lambda: receiver.of(trace_id).keys() >= SPANS.keys())

    spans = receiver.of(trace_id)
    names = {item.span.span_id: name for name, item in spans.items()}
    arrived = {
        name: (item.service, names.get(item.span.parent_span_id, ""))
        for name, item in spans.items()
    }
    assert arrived == SPANS
    assert spans["text_completion llama"].span.parent_span_id.hex() == CALLER_ID
    assert (spans["prefill"].instance, spans["decode"].instance) == ("prefill-0", "decode-0")
    root = spans["text_completion llama"].span
    for name in ("prefill", "decode", "decode.transfer", "decode.generate"):
        span = spans[name].span
        assert root.start_time_unix_nano < span.start_time_unix_nano < span.end_time_unix_nano
    told = {item.key: item.value.int_value for item in spans["decode.transfer"].span.attributes}
    assert told["baton.transferred_blocks"] == 3


def test_of_a_request_that_is_not_sampled_nothing_is_sent(
    stack: RunningStack, receiver: Receiver
) -> None:
    before = receiver.trace_ids
    stack.greedy(make_prompt(40, seed=2), NUM_OUTPUTS)
    stack.greedy(make_prompt(40, seed=3), NUM_OUTPUTS, traceparent=caller("2" * 32, "00"))
    stack.greedy(make_prompt(40, seed=4), NUM_OUTPUTS, traceparent=caller("3" * 32))
    receiver.wait_for(lambda: receiver.of("3" * 32).keys() >= SPANS.keys())
    assert receiver.trace_ids - before == {"3" * 32}


def test_a_collector_that_is_away_changes_no_answer_and_keeps_nothing_from_stopping(
    model: tuple[Path, Reference],
) -> None:
    prompt = make_prompt(40, seed=5)
    away = {"BATON_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}
    # Leaving the context fails when the stack does not stop in time.
    with running_stack(model[0], "--dtype", "float32", env=away) as stack:
        for _ in range(3):
            answer = stack.greedy(prompt, NUM_OUTPUTS, traceparent=CALLER)
            assert answer.token_ids == model[1](prompt, NUM_OUTPUTS)
        stack.wait_until_idle()
