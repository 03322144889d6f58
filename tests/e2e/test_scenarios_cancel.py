"""Clients that leave, in every phase of a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.harness import make_prompt
from tests.faults.stack import FaultStack, fault_stack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack(tiny) -> Iterator[FaultStack]:  # type: ignore[no-untyped-def]
    small = ("--num-gpu-blocks-override", "32")
    with fault_stack(tiny("llama"), decode_args=small, prefill_args=small) as stack:
        yield stack


def test_a_cancel_while_decode_waits_for_kv_frees_the_export_without_a_timeout(
    stack: FaultStack,
) -> None:
    with stack.client() as client, stack.faults["decode-0"].hold("pull:before") as reading:
        with client.stream(token_ids=make_prompt(100), max_tokens=50) as stream:
            next(stream)
            reading.wait()
        assert stack.wait_idle(timeout_s=5) == []  # half of the lease
    stack.check_recovered()
