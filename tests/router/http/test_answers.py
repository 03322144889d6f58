"""Completions and chats as OpenAI's client sees them, whole."""

import asyncio

import openai
import pytest

from tests.router.fakes import Script
from tests.router.stack import REPLY

TEXT = "Paris, of course."


async def test_a_completion_has_text_usage_and_why_it_ended(serve):
    async with serve() as s:
        answer = await s.complete("Where?")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, TEXT, "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 18, 24)
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_a_chat_answers_as_the_assistant(serve):
    async with serve() as s:
        answer = await s.chat("hi")
        (dispatch,) = s.stack.prefills[0].dispatches
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(dispatch.prompt_token_ids)


async def test_the_blocking_client_gets_the_same(serve):
    arguments = {"model": "tiny", "prompt": "Where?", "max_tokens": 5}
    async with serve() as s:
        with openai.OpenAI(base_url=s.openai.base_url, api_key="none") as client:
            answer = await asyncio.to_thread(client.completions.create, **arguments)
            stream = await asyncio.to_thread(client.completions.create, stream=True, **arguments)
            chunks = await asyncio.to_thread(list, stream)
    assert answer.choices[0].text == "Paris"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Paris"


async def test_a_completion_has_16_tokens_unless_more_are_asked_for(serve):
    async with serve() as s:
        answer = await s.openai.completions.create(model="tiny", prompt="Where?")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:16], "length")


async def test_several_answers_are_choices_of_one_request(serve):
    async with serve() as s:
        answer = await s.chat(n=3)
        (dispatch,) = s.stack.prefills[0].dispatches
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [TEXT, TEXT[1:], TEXT[2:]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 18 + 17 + 16
    assert dispatch.n == 3


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(serve):
    async with serve() as s:
        answer = await s.complete(["a", "bcd"], n=2, max_tokens=2)
    texts = [(choice.index, choice.text) for choice in answer.choices]
    assert texts == [(0, "Pa"), (1, "ar"), (2, "Pa"), (3, "ar")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_a_prompt_may_be_token_ids(serve, prompt):
    async with serve() as s:
        answer = await s.complete(prompt)
        (dispatch,) = s.stack.prefills[0].dispatches
    assert answer.choices[0].text == TEXT
    assert list(dispatch.prompt_token_ids) == [5, 6, 7]


async def test_parts_of_a_message_are_joined_as_they_are(serve):
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]
    async with serve() as s:
        await s.chat(parts)
        await s.chat("what now")
        first, second = s.stack.prefills[0].dispatches
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_a_developer_speaks_as_the_system(serve):
    async def ask(s, role):
        messages = [{"role": role, "content": "Be brief."}]
        await s.openai.chat.completions.create(model="tiny", messages=messages)

    async with serve() as s:
        await ask(s, "developer")
        await ask(s, "system")
        first, second = s.stack.prefills[0].dispatches
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_parameters_reach_the_workers(serve):
    more = {"top_k": 7, "min_p": 0.5, "min_tokens": 2, "repetition_penalty": 1.5}
    async with serve() as s:
        await s.chat(
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"65": 3},
            max_completion_tokens=9,
            extra_body=more | {"ignore_eos": True, "stop_token_ids": [4]},
        )
        (dispatch,) = s.stack.decodes[0].dispatches
    sampling = dispatch.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert dict(sampling.logit_bias) == {65: 3}
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (7, 0.5, 2)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.5, 9)
    assert list(sampling.stop_token_ids) == [4]
    assert list(dispatch.eos_token_ids) == []


@pytest.mark.parametrize("stop", [", of", ["x", ", of"]])
async def test_a_stop_string_ends_the_text_before_it(serve, stop):
    async with serve() as s:
        answer = await s.complete(stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Paris", "stop")


async def test_an_echo_begins_with_the_prompt(serve):
    async with serve() as s:
        text = await s.complete("Where? ", echo=True)
        ids = await s.complete([REPLY[0]], echo=True, max_tokens=1)
    assert text.choices[0].text == "Where? " + TEXT
    assert ids.choices[0].text == "PP"


async def test_an_echo_without_tokens_is_only_the_prompt(serve):
    async with serve() as s:
        answer = await s.complete("Where?", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Where?", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 0)


async def test_a_request_with_the_same_id_joins_the_first(serve):
    async with serve(script=Script(list(REPLY))) as s:
        same = {"x-request-id": "one"}
        first = await s.complete(extra_headers=same)
        second = await s.complete(extra_headers=same)
        assert len(s.stack.prefills[0].dispatches) == 1
    assert first.choices == second.choices
    assert first.id == second.id == "cmpl-one"
