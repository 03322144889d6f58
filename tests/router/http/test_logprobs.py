"""Log-probabilities: tokens as text and bytes, offsets, echoed prompts."""

import itertools

from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer
from tests.router.fakes import Script

AE = byte_tokenizer().encode("aé").ids


async def test_a_chat_has_each_token_with_its_bytes_and_the_likeliest(serve):
    async with serve() as s:
        answer = await s.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("P", [80], -0.25)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("P", -0.25), ("Q", -0.75)]
    assert second.token == "a"


async def test_without_top_logprobs_only_the_chosen_token_is_told(serve):
    async with serve() as s:
        answer = await s.chat(logprobs=True, max_tokens=1)
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.top_logprobs) == ("P", [])


async def test_half_a_character_is_told_as_bytes(serve):
    async with serve(script=Script([*AE, EOS_TOKEN_ID])) as s:
        answer = await s.chat(logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert bytes(byte for entry in content[:3] for byte in entry.bytes).decode() == "aé"
    assert len(content) == answer.usage.completion_tokens


async def test_a_completion_has_parallel_lists(serve):
    async with serve(script=Script([*AE, EOS_TOKEN_ID])) as s:
        answer = await s.complete(logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.top_logprobs[0] == {"a": -0.25}


async def test_logprobs_0_tells_the_chosen_token(serve):
    async with serve() as s:
        answer = await s.complete(logprobs=0, max_tokens=1)
    assert answer.choices[0].logprobs.top_logprobs == [{"P": -0.25}]


async def test_an_echo_scores_the_prompt_but_for_its_first_token(serve):
    async with serve() as s:
        answer = await s.complete("ab", echo=True, logprobs=2, max_tokens=1)
        (dispatch,) = s.stack.prefills[0].dispatches
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abP"
    assert logprobs.tokens == ["a", "b", "P"]
    assert logprobs.token_logprobs == [None, -0.25, -0.25]
    assert logprobs.top_logprobs == [None, {"b": -0.25, "c": -0.75}, {"P": -0.25, "Q": -0.75}]
    assert logprobs.text_offset == [0, 1, 2]
    assert dispatch.prompt_logprobs == 2


async def test_an_echo_without_tokens_only_scores(serve):
    async with serve() as s:
        answer = await s.complete(["ab<eos>c", "x"], echo=True, logprobs=0, max_tokens=0)
    first, second = answer.choices
    assert (first.text, first.logprobs.tokens) == ("ab<eos>c", ["a", "b", "<eos>", "c"])
    assert first.logprobs.text_offset == [0, 1, 2, 7]
    assert (second.text, second.logprobs.token_logprobs) == ("x", [None])
    assert answer.usage.completion_tokens == 0


async def test_a_prompt_of_one_token_has_no_score(serve):
    async with serve() as s:
        answer = await s.complete("x", echo=True, logprobs=0, max_tokens=3)
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25, -0.25]


async def test_streamed_logprobs_join_to_the_same(serve):
    async with serve(script=Script([*AE, EOS_TOKEN_ID])) as s:
        parameters = {"echo": True, "logprobs": 1}
        whole = await s.complete("é!", **parameters)
        chunks = [chunk async for chunk in await s.complete("é!", stream=True, **parameters)]
    for name, values in whole.choices[0].logprobs:
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks]
        assert list(itertools.chain(*parts)) == values
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


async def test_without_logprobs_there_are_none(serve):
    async with serve() as s:
        completion, chat = await s.complete(), await s.chat()
        assert not s.stack.decodes[0].dispatches[0].sampling.HasField("logprobs")
    assert completion.choices[0].logprobs is chat.choices[0].logprobs is None
