"""The client class, blocking and asyncio, against a scripted router."""

from __future__ import annotations

import pytest

from client import AsyncBatonClient, BatonClient, Choice, Route, Timing, Usage
from core.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from tests.client.conftest import two_answers
from tests.traces import CALLER


def test_generate_returns_the_whole_completion(router):
    with BatonClient(router.address) as client:
        completion = client.generate("The capital?", max_tokens=3)
    assert completion.text == "Paris."
    assert completion.token_ids == [7, 8, 9]
    assert completion.finish_reason == "stop"
    assert completion.usage == Usage(prompt_tokens=5, completion_tokens=3)
    assert completion.route == Route("prefill-0", "decode-0", 16, 2, 1)
    assert completion.timing == Timing(ttft_s=0.25, total_s=0.5)


def test_each_of_several_answers_comes_whole_with_the_prompts_log_probabilities(router):
    router.responses = two_answers()
    with BatonClient(router.address) as client:
        completion = client.generate("x", n=2, prompt_logprobs=0)
    assert completion.choices == [
        Choice("a b", [ord("a"), ord("b")], [], "stop"),
        Choice("c", [ord("c")], [], "length"),
    ]
    assert (completion.text, completion.finish_reason) == ("a b", "stop")
    assert [entry.logprob for entry in completion.prompt_logprobs] == [-1.5, -0.5]
    assert (router.requests[0].n, router.requests[0].prompt_logprobs) == (2, 0)
    assert router.requests[0].HasField("prompt_logprobs")


def test_an_answer_without_its_end_is_an_error(router):
    router.responses = [item for item in two_answers() if item.choice == 0]
    router.responses[1].choice = 1
    with BatonClient(router.address) as client, pytest.raises(Unavailable, match="ended before"):
        client.generate("x", n=2)


def test_every_call_carries_the_api_key(router):
    with BatonClient(router.address, "secret") as client:
        client.generate("x")
        client.model()
        client.status()
    with BatonClient(router.address) as client:
        client.model()
    assert router.authorizations == ["Bearer secret"] * 3 + [None]


async def test_every_call_of_the_asyncio_client_carries_the_api_key(router):
    async with AsyncBatonClient(router.address, "secret") as client:
        await client.generate("x")
        await client.model()
        await client.status()
    assert router.authorizations == ["Bearer secret"] * 3


def test_a_request_carries_the_trace_of_its_caller_if_it_has_one(router):
    with BatonClient(router.address, "secret") as client:
        client.generate("x", traceparent=CALLER)
        client.generate("x")
    assert router.traceparents == [CALLER, None]
    assert router.authorizations == ["Bearer secret"] * 2


async def test_so_does_a_request_of_the_asyncio_client(router):
    async with AsyncBatonClient(router.address) as client:
        await client.generate("x", traceparent=CALLER)
    assert router.traceparents == [CALLER]


def test_a_trace_that_no_header_can_carry_is_refused(router):
    with (
        BatonClient(router.address) as client,
        pytest.raises(InvalidArgument, match="traceparent must be printable ASCII"),
    ):
        client.generate("x", traceparent="a\nb")


def test_an_api_key_that_no_header_can_carry_is_refused():
    with pytest.raises(InvalidArgument, match="api_key must be printable ASCII"):
        BatonClient(api_key="a\nb")


def test_stream_yields_chunks_and_then_the_completion(router):
    with BatonClient(router.address) as client, client.stream("x") as stream:
        chunks = list(stream)
        assert [chunk.text for chunk in chunks] == ["Par", "is."]
        assert [chunk.finish_reason for chunk in chunks] == [None, "stop"]
        assert stream.completion().text == "Paris."


def test_leaving_a_stream_early_cancels_the_call(router):
    router.hangs = True
    with BatonClient(router.address) as client:
        with client.stream("x") as stream:
            next(stream)
            assert not router.call_ended.is_set()
        assert router.call_ended.wait(30)


def test_an_error_of_the_router_keeps_its_type_and_field(router):
    router.responses = []
    router.error = InvalidArgument("top_p must be in (0, 1], not 2", field="top_p")
    with BatonClient(router.address) as client, pytest.raises(InvalidArgument) as caught:
        client.generate("x", top_p=2.0)
    assert (caught.value.message, caught.value.field) == ("top_p must be in (0, 1], not 2", "top_p")


def test_a_timeout_is_sent_as_the_deadline(router):
    with BatonClient(router.address) as client:
        client.generate("x", timeout_s=200)
    assert 100 < router.time_remaining <= 202  # gRPC rounds up what it sends


def test_a_call_ends_at_its_deadline(router):
    router.hangs = True
    with BatonClient(router.address) as client, pytest.raises(DeadlineExceeded):
        client.generate("x", timeout_s=0.2)


def test_a_call_that_a_stopping_router_cancels_is_sent_again(router):
    router.num_cancelled = 2
    with BatonClient(router.address) as client:
        assert client.generate("Where?").text == "Paris."
    assert len(router.requests) == 3


async def test_the_async_client_sends_a_cancelled_call_again_too(router):
    router.num_cancelled = 1
    async with AsyncBatonClient(router.address) as client:
        assert (await client.generate("Where?")).text == "Paris."


def test_a_call_that_is_cancelled_after_its_first_tokens_is_not_sent_again(router):
    router.responses, router.error = router.responses[:1], Cancelled("the router stops")
    with BatonClient(router.address) as client, pytest.raises(Cancelled):
        client.generate("Where?")
    assert len(router.requests) == 1


def test_a_missing_server_is_named():
    with BatonClient("127.0.0.1:1") as client, pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        client.model()


def test_a_stream_without_its_last_message_is_an_error(router):
    router.responses = router.responses[:1]
    with BatonClient(router.address) as client, pytest.raises(Unavailable, match="ended before"):
        client.generate("x")


def test_model_and_status_come_as_the_protocol_has_them(router):
    with BatonClient(router.address) as client:
        assert client.model().name == "tiny"
        assert client.status(audit=True).workers[0].id == "prefill-0"
    assert router.audits == [True]


async def test_the_async_client_does_the_same(router):
    async with AsyncBatonClient(router.address) as client:
        completion = await client.generate(token_ids=[1, 2], seed=3)
        assert completion.text == "Paris."
        assert (await client.model()).name == "tiny"
        assert (await client.status()).router.pid == 41
    assert list(router.requests[0].token_ids.ids) == [1, 2]


async def test_closing_an_async_stream_cancels_the_call(router):
    router.hangs = True
    async with AsyncBatonClient(router.address) as client:
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "Par"
        assert router.call_ended.wait(30)


async def test_async_errors_are_translated_too(router):
    router.responses = []
    router.error = InvalidArgument("prompt is empty", field="prompt")
    async with AsyncBatonClient(router.address) as client:
        with pytest.raises(InvalidArgument, match="prompt is empty"):
            await client.generate("")
    async with AsyncBatonClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            await client.status()
