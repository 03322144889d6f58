"""What a worker sends to its routers, and when it gives one up."""

import asyncio
import contextlib

import pytest

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from worker import outputs
from worker.outputs import OutputHub, PlainToken

READY, DRAINING = types_pb2.WORKER_STATE_READY, types_pb2.WORKER_STATE_DRAINING


class Hub:
    """An OutputHub with the state that it reports and the routers that it lost."""

    def __init__(self):
        self.state = READY
        self.lost = []
        self.load = types_pb2.Load(running=1)
        self.hub = OutputHub(self._report, self.lost.append)

    def _report(self):
        return types_pb2.Load.FromString(self.load.SerializeToString()), self.state


async def test_outputs_of_one_moment_travel_in_one_message():
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages:
        assert (await anext(messages)).state == READY
        for index in range(3):
            h.hub.publish("r", worker_pb2.SequenceOutput(output_index=index))
        assert [output.output_index for output in (await anext(messages)).outputs] == [0, 1, 2]
    assert h.lost == ["r"]


async def test_a_load_that_falls_after_the_last_outputs_is_told_soon(monkeypatch):
    monkeypatch.setattr(outputs, "REPORT_INTERVAL_S", 60.0)
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages, asyncio.timeout(30):
        await anext(messages)
        h.hub.publish("r", worker_pb2.SequenceOutput())
        assert (await anext(messages)).load.running == 1
        # The task of the last request ends after its outputs are on their way.
        h.load.running = 0
        last = await anext(messages)
    assert (last.load.running, len(last.outputs)) == (0, 0)


async def test_a_router_that_takes_the_worker_for_idle_hears_of_anothers_requests(monkeypatch):
    monkeypatch.setattr(outputs, "REPORT_INTERVAL_S", 60.0)
    h = Hub()
    h.load.running = 0
    async with (
        contextlib.aclosing(h.hub.attach("a")) as own,
        contextlib.aclosing(h.hub.attach("b")) as other,
        asyncio.timeout(30),
    ):
        await anext(own)
        await anext(other)
        h.load.running = 1
        h.hub.publish("a", worker_pb2.SequenceOutput())
        assert (await anext(other)).load.running == 1


async def test_what_is_accepted_travels_with_the_next_outputs(monkeypatch):
    monkeypatch.setattr(outputs, "CHANGE_INTERVAL_S", 60.0)
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages, asyncio.timeout(30):
        await anext(messages)
        for stream_id in (3, 4):
            h.hub.accepted(worker_pb2.Dispatch(router_id="r", stream_id=stream_id))
        h.hub.publish("r", worker_pb2.SequenceOutput())
        told = await anext(messages)
        assert (list(told.accepted), len(told.outputs)) == ([3, 4], 1)
        h.hub.publish("r", worker_pb2.SequenceOutput())
        assert list((await anext(messages)).accepted) == []


async def test_without_outputs_it_is_told_soon_even_if_load_is_as_before(monkeypatch):
    monkeypatch.setattr(outputs, "REPORT_INTERVAL_S", 60.0)
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages, asyncio.timeout(30):
        await anext(messages)
        h.hub.accepted(worker_pb2.Dispatch(router_id="r", stream_id=3))
        assert list((await anext(messages)).accepted) == [3]


async def test_who_takes_the_worker_for_idle_hears_at_once_of_what_it_accepts(monkeypatch):
    monkeypatch.setattr(outputs, "REPORT_INTERVAL_S", 60.0)
    monkeypatch.setattr(outputs, "CHANGE_INTERVAL_S", 60.0)
    h = Hub()
    h.load.running = 0
    async with (
        contextlib.aclosing(h.hub.attach("a")) as own,
        contextlib.aclosing(h.hub.attach("b")) as other,
        asyncio.timeout(30),
    ):
        await anext(own)
        await anext(other)
        h.load.running = 1
        h.hub.accepted(worker_pb2.Dispatch(router_id="a", stream_id=3))
        told = await anext(own)
        assert (list(told.accepted), told.load.running) == ([3], 1)
        assert (await anext(other)).load.running == 1


async def test_without_changes_there_is_one_report_an_interval(monkeypatch):
    monkeypatch.setattr(outputs, "REPORT_INTERVAL_S", 60.0)
    monkeypatch.setattr(outputs, "CHANGE_INTERVAL_S", 0.01)
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages:
        await anext(messages)
        coming = asyncio.ensure_future(anext(messages))
        done, _ = await asyncio.wait({coming}, timeout=0.2)
        assert not done
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


async def test_the_last_message_of_a_worker_that_stops_says_so():
    h = Hub()
    messages = h.hub.attach("r")
    await anext(messages)
    h.state = DRAINING
    h.hub.close()
    assert [message.state async for message in messages] == [DRAINING]


async def test_a_router_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(outputs, "MAX_BUFFERED_OUTPUTS", 3)
    h = Hub()
    messages = h.hub.attach("r")
    await anext(messages)
    for _ in range(4):
        h.hub.publish("r", worker_pb2.SequenceOutput())
    assert h.lost == ["r"]
    with pytest.raises(Unavailable):
        h.hub.require("r")
    assert [len(message.outputs) async for message in messages] == [0]


async def test_nor_does_what_it_sends_pile_up(monkeypatch):
    monkeypatch.setattr(outputs, "MAX_BUFFERED_OUTPUTS", 3)
    h = Hub()
    messages = h.hub.attach("r")
    await anext(messages)
    for stream_id in range(4):
        h.hub.accepted(worker_pb2.Dispatch(router_id="r", stream_id=stream_id))
    assert h.lost == ["r"]
    assert [list(message.accepted) async for message in messages] == [[]]


@pytest.mark.parametrize("is_closed", [True, False])
async def test_an_output_with_a_prompts_log_probabilities_ends_its_message(is_closed):
    h = Hub()
    messages = h.hub.attach("r")
    await anext(messages)
    for index in range(4):
        scores = [types_pb2.TokenLogprobs()] if index in (1, 2) else []
        h.hub.publish("r", worker_pb2.SequenceOutput(output_index=index, prompt_logprobs=scores))
    if is_closed:
        h.hub.close()
    received = [[output.output_index for output in (await anext(messages)).outputs] for _ in "123"]
    assert received == [[0, 1], [2], [3]]
    await messages.aclose()


def plain(index, choice=0):
    return PlainToken(choice, index, token_id=100 + index)


async def test_plain_tokens_of_one_step_travel_in_columns():
    h = Hub()
    dispatches = [worker_pb2.Dispatch(router_id="r", stream_id=first) for first in (10, 20)]
    async with contextlib.aclosing(h.hub.attach("r")) as messages:
        await anext(messages)
        h.hub.publish_token(dispatches[0], plain(3, choice=1))
        h.hub.publish_token(dispatches[1], plain(5))
        tokens = (await anext(messages)).tokens
        h.hub.publish_token(dispatches[1], plain(6))
        later = (await anext(messages)).tokens
    assert (list(tokens.stream_ids), list(tokens.output_indexes)) == ([11, 20], [3, 5])
    assert list(tokens.token_ids) == [103, 105]
    assert (list(later.stream_ids), list(later.output_indexes)) == ([20], [6])


async def test_a_token_does_not_overtake_an_output_that_waits():
    h = Hub()
    dispatch = worker_pb2.Dispatch(request_id="q", attempt=2, router_id="r", stream_id=10)
    async with contextlib.aclosing(h.hub.attach("r")) as messages:
        await anext(messages)
        h.hub.publish("r", worker_pb2.SequenceOutput(request_id="q", output_index=0))
        h.hub.publish_token(dispatch, plain(1))
        message = await anext(messages)
    assert not message.tokens.stream_ids
    assert [output.output_index for output in message.outputs] == [0, 1]
    assert (message.outputs[1].attempt, list(message.outputs[1].token_ids)) == (2, [101])


async def test_a_router_that_reads_no_plain_tokens_is_given_up(monkeypatch):
    monkeypatch.setattr(outputs, "MAX_BUFFERED_OUTPUTS", 3)
    h = Hub()
    messages = h.hub.attach("r")
    await anext(messages)
    for index in range(4):
        h.hub.publish_token(worker_pb2.Dispatch(router_id="r"), plain(index))
    assert h.lost == ["r"]
    await messages.aclose()
