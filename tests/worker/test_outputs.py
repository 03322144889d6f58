"""What a worker sends to its routers, and when it gives one up."""

import contextlib

import pytest

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from worker import outputs
from worker.outputs import OutputHub

READY, DRAINING = types_pb2.WORKER_STATE_READY, types_pb2.WORKER_STATE_DRAINING


class Hub:
    """An OutputHub with the state that it reports and the routers that it lost."""

    def __init__(self):
        self.state = READY
        self.lost = []
        self.hub = OutputHub(lambda: (types_pb2.Load(running=1), self.state), self.lost.append)


async def test_outputs_of_one_moment_travel_in_one_message():
    h = Hub()
    async with contextlib.aclosing(h.hub.attach("r")) as messages:
        assert (await anext(messages)).state == READY
        for index in range(3):
            h.hub.publish("r", worker_pb2.SequenceOutput(output_index=index))
        assert [output.output_index for output in (await anext(messages)).outputs] == [0, 1, 2]
    assert h.lost == ["r"]


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
