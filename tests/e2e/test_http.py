"""OpenAI's client against real workers and a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
import tokenizers

from tests.e2e.stack import RunningStack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def stack(smollm2: Path) -> Iterator[RunningStack]:
    named = ("--served-model-name", MODEL, "--http-port", "0")
    with running_stack(smollm2, "--dtype", "float32", *named) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def ask(client, **parameters):  # type: ignore[no-untyped-def]
    """A greedy chat completion."""
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0} | parameters
    )


def test_it_knows_the_capital_of_france(client: openai.OpenAI, stack: RunningStack) -> None:
    assert ask(client).choices[0].message.content == ANSWER
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"
    stack.wait_until_idle()


def test_64_streams_at_once_equal_the_answers_one_by_one(
    client: openai.OpenAI, stack: RunningStack
) -> None:
    prompts = [f"Chapter {number}. It was" for number in range(64)]
    parameters = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=item, **parameters) for item in prompts]

    async def at_once() -> list[str]:
        async def one(talking: openai.AsyncOpenAI, prompt: str) -> str:
            stream = await talking.completions.create(prompt=prompt, stream=True, **parameters)
            return "".join([chunk.choices[0].text async for chunk in stream])

        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as talking:
            return await asyncio.gather(*(one(talking, prompt) for prompt in prompts))

    assert asyncio.run(at_once()) == [answer.choices[0].text for answer in alone]
    together = client.completions.create(prompt=prompts, **parameters)
    assert [choice.text for choice in together.choices] == [a.choices[0].text for a in alone]
    stack.wait_until_idle()


def test_usage_counts_the_tokenizers_tokens(
    client: openai.OpenAI, stack: RunningStack, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = "Über den Wolken, naïve café 🎉 " * 20
    usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 0)

    again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5).usage
    assert again is not None and again.prompt_tokens_details is not None
    assert (again.prompt_tokens_details.cached_tokens or 0) >= usage.prompt_tokens - 32

    body = {"messages": [{"role": "user", "content": QUESTION}]}
    counted = httpx2.post(f"http://{stack.http}/tokenize", json=body).json()["count"]
    assert ask(client).usage.prompt_tokens == counted


def test_hot_samples_stream_as_the_same_text_whatever_characters_they_have(
    client: openai.OpenAI,
) -> None:
    whole, streamed = "", ""
    for seed in range(4):
        parameters = {"model": MODEL, "prompt": "日本語:", "max_tokens": 40, "seed": seed}
        parameters |= {"temperature": 3.0}
        whole += client.completions.create(**parameters).choices[0].text
        chunks = client.completions.create(**parameters, stream=True)
        streamed += "".join(chunk.choices[0].text for chunk in chunks)
    assert not whole.isascii()
    assert streamed == whole


def test_a_stop_string_ends_the_text_and_frees_the_workers(
    client: openai.OpenAI, stack: RunningStack
) -> None:
    answer = ask(client, stop=[" is Paris"], max_tokens=500)
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].finish_reason == "stop"
    stack.wait_until_idle()


def test_log_probabilities_tell_the_greedy_tokens(
    client: openai.OpenAI, tokenizer: tokenizers.Tokenizer
) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    *text, end = content
    assert b"".join(bytes(entry.bytes) for entry in text).decode() == ANSWER
    assert end.token == "<|im_end|>"
    for entry in content:
        assert [top.token for top in entry.top_logprobs][:1] == [entry.token]
        assert entry.top_logprobs[0].logprob == entry.logprob < 0
        assert len(entry.top_logprobs) == 3
