"""Server-sent events: what comes when, how a stream ends, and what a client that leaves frees."""

import asyncio
import json

import openai
import pytest

from core.errors import InvalidArgument
from router.http.protocol import StreamProtocol
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer
from tests.router.fakes import Script
from tests.router.stack import REPLY, wait_for

TEXT = "Paris, of course."
EMOJI = [*byte_tokenizer().encode("a🎉é").ids, EOS_TOKEN_ID]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "stream": True}
HANGING = {"num_decode_tokens": 3}
"""Decode falls silent after some tokens."""


def events(body):
    """The data of each event."""
    assert body.endswith("\n\n")
    return [event.removeprefix("data: ") for event in body.removesuffix("\n\n").split("\n\n")]


async def joined(stream):
    """The text of each choice, and the last chunk."""
    texts, chunk = {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts, chunk


async def test_a_streamed_completion_is_the_same_text(serve):
    async with serve() as s:
        texts, last = await joined(await s.complete(stream=True))
    assert texts == {0: TEXT}
    assert (last.choices[0].finish_reason, last.usage) == ("stop", None)


async def test_the_role_comes_once_and_the_reason_last(serve):
    async with serve() as s:
        chunks = [chunk async for chunk in await s.chat(stream=True)]
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_an_answer_of_one_token_is_whole_before_the_connection_ends(serve):
    request = {"prompt": "Where?", "max_tokens": 1, "stream": True}
    async with serve() as s:
        response = await s.http.post(
            "/v1/completions", json=request, headers={"connection": "close"}
        )
    first, done = events(response.text)
    assert (json.loads(first)["choices"][0]["text"], done) == ("P", "[DONE]")
    assert response.headers["connection"] == "close"


async def test_choices_and_prompts_stream_side_by_side(serve):
    async with serve() as s:
        texts, _ = await joined(await s.complete(["a", "b"], n=2, stream=True))
    assert texts == {0: TEXT, 1: TEXT[1:], 2: TEXT, 3: TEXT[1:]}


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(serve):
    async with serve() as s:
        stream = await s.chat(stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 18
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


async def test_the_wire_carries_events_and_ends_with_done(serve):
    async with serve() as s:
        response = await s.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    first, *others = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert first.pop("role") == "assistant"
    assert {key for delta in (first, *others) for key in delta} == {"content"}
    assert "".join(delta["content"] for delta in (first, *others)) == "Pa"


async def test_every_event_is_valid_utf8_and_none_is_empty(serve):
    async with serve(script=Script(EMOJI)) as s:
        response = await s.http.post("/v1/chat/completions", json=CHAT)
    *chunks, _ = events(response.content.decode("utf-8", errors="strict"))
    contents = [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "".join(filter(None, contents)) == "a🎉é"
    assert "" not in contents


async def test_an_echo_comes_first_in_every_choice(serve):
    async with serve() as s:
        stream = await s.complete("Q: ", n=2, echo=True, max_tokens=3, stream=True)
        texts, _ = await joined(stream)
    assert texts == {0: "Q: Par", 1: "Q: ari"}


async def test_what_fails_before_the_first_token_has_a_status(serve):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError, match="temperature must be from 0"):
            await s.chat(stream=True, temperature=-1)


async def test_what_fails_later_is_the_last_event(serve):
    script = Script(list(REPLY), **HANGING, fault=InvalidArgument("worker says no"))
    async with serve(script=script) as s:
        response = await s.http.post("/v1/chat/completions", json=CHAT)
        with pytest.raises(openai.APIError, match="worker says no"):
            await joined(await s.chat(stream=True))
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert "Pari" in "".join(json.loads(c)["choices"][0]["delta"]["content"] for c in chunks)
    assert json.loads(last)["error"]["type"] == "invalid_request_error"


async def test_a_deadline_in_a_stream_is_the_last_event(serve):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        headers = {"x-request-timeout": "2"}
        response = await s.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert json.loads(events(response.text)[-1])["error"]["code"] == "timeout"


async def test_a_client_that_closes_its_stream_frees_both_workers(serve):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        stream = await s.chat(stream=True)
        await anext(stream)
        await stream.close()
        await wait_for(lambda: s.stack.prefills[0].aborts and s.stack.decodes[0].aborts)
        await wait_for(lambda: s.stack.router._table.num_running == 0)


async def test_a_client_that_does_not_wait_for_its_answer_frees_both_workers(serve):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        asking = asyncio.create_task(s.chat())
        await wait_for(lambda: s.stack.decodes[0].dispatches)
        asking.cancel()
        await wait_for(lambda: s.stack.prefills[0].aborts and s.stack.decodes[0].aborts)
        await wait_for(lambda: s.stack.router._table.num_running == 0)


async def test_a_stopping_router_ends_streams_with_an_error(serve):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        stream = await s.chat(stream=True)
        await anext(stream)
        await s.stack.router.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            await joined(stream)


async def test_64_streams_at_once_are_each_whole(serve):
    async with serve() as s:
        streams = await asyncio.gather(*(s.chat(str(i), stream=True) for i in range(64)))
        answers = await asyncio.gather(*map(joined, streams))
    assert [texts for texts, _ in answers] == [{0: TEXT}] * 64


async def test_a_client_that_does_not_read_gets_the_rest_when_it_does(serve, monkeypatch):
    connections = []
    connect = StreamProtocol.connection_made
    monkeypatch.setattr(
        StreamProtocol,
        "connection_made",
        lambda self, transport: connections.append(self) or connect(self, transport),
    )
    async with serve(script=Script(reply=REPLY, num_decode_tokens=0)) as s:
        stream = await s.complete(stream=True, max_tokens=8)
        (decode,) = s.stack.decodes
        (log,) = [entry.run.log for entry in s.stack.router._table._running.values()]

        async def send(*indexes):
            (dispatch,) = decode.dispatches
            for index in indexes:
                decode.send(dispatch, decode.script_output(dispatch, index))
            await wait_for(lambda: log.num_tokens == indexes[-1] + 1)

        texts = [(await anext(stream)).choices[0].text]
        for index in range(1, 4):
            await send(index)
            texts.append((await anext(stream)).choices[0].text)
        connections[-1].pause_writing()
        await send(4)
        await send(5, 6, 7)
        assert log.choices[0].lane is None
        connections[-1].resume_writing()
        texts += [chunk.choices[0].text async for chunk in stream]
    # Of those that came meanwhile, the first one waited in ASGI and the others behind it.
    assert texts == [*TEXT[:5], TEXT[5:8]]
