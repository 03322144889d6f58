"""Requests without a prefill worker, seen from the router; and the load that it predicts."""

import asyncio

import pytest

from baton.v1 import inference_pb2
from core.errors import Unavailable
from tests.router.fakes import Script
from tests.router.stack import REPLY, prompt, stack, wait_for


@pytest.fixture
def serve(tmp_path, redis_server):
    options = {"local_prefill_max_tokens": 64}
    return lambda **more: stack(tmp_path / "tiny", redis_server.url, **{**options, **more})


async def test_a_short_prompt_goes_to_decode_alone(serve):
    async with serve() as s:
        answer = await s.ask(prompt("Where is it?"))
        assert answer.text == "Paris, of course."
        assert s.prefills[0].dispatches == []
        route = inference_pb2.Route(decode_worker="decode-0", cached_tokens=4, attempts=1)
        assert answer.last.route == route


async def test_a_longer_prompt_is_handed_off(serve):
    async with serve() as s:
        answer = await s.ask(prompt("Where is it? " * 8))
        assert answer.last.route.prefill_worker == "prefill-0"


async def test_several_choices_and_prompt_logprobs_are_handed_off(serve):
    async with serve() as s:
        request = prompt("Where?", max_tokens=1)
        request.prompt_logprobs = 0
        placer = s.router._table._shared.placer
        async for _ in s.stub.Generate(request):
            break
        await wait_for(lambda: placer.counters.decisions == 1)
        assert placer.counters.stayed == 0


async def test_a_request_whose_decode_worker_fails_goes_on_at_another(serve):
    script = Script(list(REPLY), num_decode_tokens=3, fault=Unavailable("gone"), num_faults=1)
    async with serve(script=script, num_decode=2) as s:
        answer = await s.ask(prompt("Where is it?"))
        assert answer.text == "Paris, of course."
        assert answer.last.route.attempts == 2
        assert s.prefills[0].dispatches == []


async def test_load_is_predicted_until_the_request_is_over(serve):
    async with serve() as s:
        await s.ask(prompt("Where is it?"))
        await s.ask(prompt("Where is it? " * 8))
        links = s.router._pool.links
        assert [len(link.predicted) for link in links] == [0, 0]


async def test_load_is_predicted_until_a_report_tells(serve):
    script = Script(list(REPLY), num_decode_tokens=3)
    async with serve(script=script) as s:
        asking = asyncio.create_task(s.ask(prompt("Where is it? " * 8)))
        links = s.router._pool.links
        await wait_for(lambda: all(link.load_at and link._sinks for link in links))
        await wait_for(lambda: [len(link.predicted) for link in links] == [0, 0])
        assert all(link._sinks for link in links)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
