"""A decode worker gives a request back before it has anything of it, as one that drains does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from baton.v1 import worker_pb2
from core.errors import HandOffGivenUp, Unavailable, to_detail
from router.dispatch import Attempt, AttemptFailed
from router.predicted_load import PredictedLoad
from router.routing import Work


class Link:
    """A worker's link that notes what it is told."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.predicted = PredictedLoad()
        self.aborted: list[tuple[str, int]] = []

    def subscribe(self, dispatch, sink, work) -> None:
        self.predicted.add(dispatch.stream_id, work)

    def unsubscribe(self, dispatch) -> None:
        self.predicted.remove(dispatch.stream_id)

    def take_tokens(self, stream_id, take) -> None:
        pass

    def leave_tokens(self, stream_id) -> None:
        pass

    def assign(self, dispatch, partner, source=None) -> None:
        pass

    def abort(self, key, choice=None) -> None:
        self.aborted.append(key)


def attempt(prefill: Link, decode: Link) -> Attempt:
    placement = SimpleNamespace(
        prefill=prefill,
        decode=decode,
        links=(decode, prefill),
        prefill_work=Work(),
        decode_work=Work(),
        source=None,
    )
    dispatch = worker_pb2.Dispatch(request_id="r", attempt=1, n=1, stream_id=1)
    choice = SimpleNamespace(
        leave_tokens=lambda: None, is_finished=False, token_taker=lambda on_stopped, on_error: None
    )
    return Attempt(dispatch, placement, [choice], lambda _: None)  # type: ignore[arg-type, list-item]


GAVE_UP = worker_pb2.SequenceOutput(error=to_detail(HandOffGivenUp("decode gave it up")))


async def test_prefill_is_told_at_once_to_drop_it() -> None:
    prefill, decode = Link("p"), Link("d")
    subject = attempt(prefill, decode)
    running = asyncio.ensure_future(subject.run())
    await asyncio.sleep(0)
    subject.on_output(decode, worker_pb2.SequenceOutput(preempted=True))  # type: ignore[arg-type]
    async with asyncio.timeout(20):  # less than it would wait for a report of prefill's
        await running
    assert prefill.aborted == decode.aborted == [("r", 1)]


async def test_that_is_no_failure_when_prefill_speaks_first() -> None:
    prefill, decode = Link("p"), Link("d")
    subject = attempt(prefill, decode)
    running = asyncio.ensure_future(subject.run())
    await asyncio.sleep(0)
    subject.on_output(prefill, GAVE_UP)  # type: ignore[arg-type]
    subject.on_output(decode, worker_pb2.SequenceOutput(preempted=True))  # type: ignore[arg-type]
    await running


async def test_a_reason_that_never_comes_fails_the_attempt() -> None:
    prefill, decode = Link("p"), Link("d")
    subject = attempt(prefill, decode)
    running = asyncio.ensure_future(subject.run())
    await asyncio.sleep(0)
    subject.on_output(prefill, GAVE_UP)  # type: ignore[arg-type]
    with pytest.raises(AttemptFailed, match="decode gave it up") as failure:
        await running
    assert type(failure.value.error) is Unavailable
