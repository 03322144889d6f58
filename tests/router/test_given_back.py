"""A decode worker gives a request back before it has anything of it, as one that drains does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from baton.v1 import worker_pb2
from router.dispatch import Attempt
from router.predicted_load import PredictedLoad
from router.routing import Work


class Link:
    """A worker's link that notes what it is told."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.predicted = PredictedLoad()
        self.aborted: list[tuple[str, int]] = []

    def subscribe(self, key, sink, work) -> None:
        self.predicted.add(key, work)

    def unsubscribe(self, key) -> None:
        self.predicted.remove(key)

    def take_tokens(self, stream_id, take) -> None:
        pass

    def leave_tokens(self, stream_id) -> None:
        pass

    def assign(self, dispatch, partner, source=None) -> None:
        pass

    def abort(self, key, choice=None) -> None:
        self.aborted.append(key)


async def test_prefill_is_told_at_once_to_drop_it() -> None:
    prefill, decode = Link("p"), Link("d")
    placement = SimpleNamespace(
        prefill=prefill,
        decode=decode,
        links=(decode, prefill),
        prefill_work=Work(),
        decode_work=Work(),
        source=None,
    )
    dispatch = worker_pb2.Dispatch(request_id="r", attempt=1, n=1, stream_id=1)
    choice = SimpleNamespace(is_finished=False, token_taker=lambda on_stopped, on_error: None)
    subject = Attempt(dispatch, placement, [choice], lambda _: None)  # type: ignore[arg-type, list-item]
    running = asyncio.ensure_future(subject.run())
    await asyncio.sleep(0)
    subject.on_output(decode, worker_pb2.SequenceOutput(preempted=True))  # type: ignore[arg-type]
    async with asyncio.timeout(0.4):  # it waits for no report of prefill's
        await running
    assert prefill.aborted == decode.aborted == [("r", 1)]
