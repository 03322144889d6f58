"""Requests that no pod can serve are answered by an endpoint elsewhere, if it can honour them."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pytest

from baton.v1 import inference_pb2, types_pb2
from core.errors import InternalError, ResourceExhausted, StartupError, Unavailable
from router.app import Router
from router.fallback import Fallback, FallbackConfig
from router.settings import RouterSettings
from router.tenants import ServiceClass, Tenant
from tests.model_folder import write_model_folder
from tests.router.stack import prompt, stack

GOLD = Tenant("g", "gold", ServiceClass(share=0.7))


def events(*messages):
    return "".join(f"data: {json.dumps(message)}\n\n" for message in messages) + "data: [DONE]\n\n"


def delta(text=None, reason=None, index=0):
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}


def piece(text, reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
ANSWER = events(piece("Par"), piece("is", "stop"), USAGE)


class Endpoint:
    """Answers everything with `content`, and keeps what it was asked."""

    def __init__(self, content=ANSWER, status=200):
        self.content, self.status = content, status
        self.asked = []

    def fallback(self, **config):
        given = {"url": "http://other/v1", "api_key": "sk-x", "model": "big"} | config
        classes = frozenset(given.pop("classes", ("gold", "silver")))
        return Fallback(
            FallbackConfig(classes=classes, **given), httpx2.MockTransport(self._handle)
        )

    def _handle(self, request):
        self.asked.append(request)
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(self.status, headers=headers, text=self.content)


@pytest.fixture
def serve(tmp_path, redis_server):
    """`async with serve(endpoint, ...) as s`: a stack whose fallback is `endpoint`."""

    @asynccontextmanager
    async def start(endpoint, **options):
        defaults = {"worker_wait_s": 0.0, "num_prefill": 0}
        async with stack(tmp_path / "tiny", redis_server.url, **(defaults | options)) as s:
            table = s.router._table
            table._shared = replace(table._shared, fallback=endpoint.fallback())
            yield s

    return start


async def test_without_pods_the_endpoint_answers(serve):
    endpoint = Endpoint()
    async with serve(endpoint) as s:
        answer = await s.ask(prompt("Where?", max_tokens=9, temperature=0.5, seed=3, stop=["x"]))
    assert (answer.text, answer.token_ids) == ("Paris", [])
    assert answer.last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert answer.last.usage == inference_pb2.Usage(prompt_tokens=7, completion_tokens=2)
    assert answer.last.route == inference_pb2.Route(decode_worker="fallback", attempts=1)
    (asked,) = endpoint.asked
    assert str(asked.url) == "http://other/v1/completions"
    assert asked.headers["authorization"] == "Bearer sk-x"
    assert json.loads(asked.content) == {
        "model": "big",
        "prompt": "Where?",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 3,
        "stop": ["x"],
    }


async def test_a_chat_without_a_limit_has_none_there_either(serve):
    endpoint = Endpoint(events(delta("a", "stop")))
    request = inference_pb2.GenerateRequest()
    request.messages.add(role="user", content="hi")
    async with serve(endpoint) as s:
        await s.ask(request)
        await s.ask(prompt("Where?"))
    chat, completion = (json.loads(asked.content) for asked in endpoint.asked)
    assert "max_tokens" not in chat
    assert completion["max_tokens"] > 16


async def test_messages_go_to_the_chat_endpoint_and_choices_come_back_apart(serve):
    endpoint = Endpoint(
        events(
            delta("a"),
            delta("b", index=1),
            delta(None, "length"),
            delta("c", "stop", index=1),
        )
    )
    request = inference_pb2.GenerateRequest(n=2)
    request.messages.add(role="user", content="Hi")
    texts, reasons = ["", ""], [0, 0]
    async with serve(endpoint) as s:
        async for message in s.stub.Generate(request):
            texts[message.choice] += message.text
            reasons[message.choice] |= message.finish_reason
    assert texts == ["a", "bc"]
    assert reasons == [types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP]
    body = json.loads(endpoint.asked[0].content)
    assert str(endpoint.asked[0].url) == "http://other/v1/chat/completions"
    assert (body["messages"], body["n"]) == ([{"role": "user", "content": "Hi"}], 2)


async def test_while_there_are_pods_nobody_asks_elsewhere(serve):
    endpoint = Endpoint()
    async with serve(endpoint, num_prefill=1) as s:
        assert (await s.ask(prompt())).text == "Paris, of course."
    assert endpoint.asked == []


async def test_what_it_cannot_give_is_refused_as_without_it(serve):
    endpoint = Endpoint(status=500)
    async with serve(endpoint) as s:
        with pytest.raises(Unavailable, match="no prefill worker is ready") as caught:
            await s.ask(prompt())
    assert caught.value.retry_after_s > 0


@pytest.mark.parametrize(
    "content",
    [
        events(piece("Par")),
        "data: {\n\n",
        events({"choices": [{"index": 7, "text": "x"}]}),
        events({"choices": 5}),
        events({"error": {"message": "overloaded"}}),
        events([1]),
        "",
    ],
)
async def test_an_answer_that_breaks_off_or_makes_no_sense_is_an_error(serve, content):
    async with serve(Endpoint(content)) as s:
        with pytest.raises(Unavailable):
            await s.ask(prompt())


async def test_halves_of_characters_are_no_text(serve):
    content = events(piece("a\ud800b"), piece("\ud83d\ude42", "stop"), USAGE)
    async with serve(Endpoint(content)) as s:
        answer = await s.ask(prompt())
    assert answer.text == "a\ufffdb🙂"


async def test_after_its_first_words_the_break_is_told(serve):
    async with serve(Endpoint(events(piece("Par")))) as s:
        with pytest.raises(Unavailable, match="the fallback broke off; send the request again"):
            await s.ask(prompt())


async def test_a_fault_of_a_worker_is_not_for_the_fallback(serve):
    endpoint = Endpoint()
    async with serve(endpoint, num_prefill=1) as s:
        s.prefills[0].refusal = InternalError("a bug")
        with pytest.raises(InternalError):
            await s.ask(prompt())
    assert endpoint.asked == []


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 5}, {"logprobs": 0}, {"ignore_eos": True}, {"stop_token_ids": [3]}, {"min_p": 0.1}],
)
def test_what_the_protocol_does_not_have_is_not_for_it(sampling):
    assert not Endpoint().fallback().takes(GOLD, prompt(**sampling))


def test_it_is_for_text_of_its_classes_only():
    fallback = Endpoint().fallback(classes=["gold"])
    tokens = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
    scored = prompt()
    scored.prompt_logprobs = 1
    assert fallback.takes(GOLD, prompt(max_tokens=3))
    assert not fallback.takes(GOLD, tokens)
    assert not fallback.takes(GOLD, scored)
    assert not fallback.takes(Tenant("b", "bronze", ServiceClass(share=0)), prompt())
    assert not Fallback(None).takes(GOLD, prompt())


async def test_a_tenant_over_its_quota_is_not_sent_elsewhere(serve, tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {class: gold, tokens_per_min: 0.001}")
    endpoint = Endpoint()
    async with serve(endpoint, tenants=path, num_prefill=1) as s:
        await s.ask(prompt())
        with pytest.raises(ResourceExhausted):
            await s.ask(prompt())
    assert endpoint.asked == []


async def test_what_the_endpoint_answers_counts_in_the_tenants_quotas(serve, tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {class: gold, tokens_per_min: 600, max_concurrent: 9}")
    used = {"choices": [], "usage": {"prompt_tokens": 50_000, "completion_tokens": 90}}
    endpoint = Endpoint(events(piece("Paris", "stop"), used))
    async with serve(endpoint, tenants=path) as s:
        with pytest.raises(ResourceExhausted) as caught:
            for _ in range(600):  # what was used is counted a little after the answer
                await s.ask(prompt(max_tokens=1))
                await asyncio.sleep(0.05)
    assert caught.value.field == "tokens_per_min"


async def test_who_is_served_by_the_endpoint_is_in_flight(serve, tmp_path, monkeypatch):
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {class: gold, max_concurrent: 1}")
    async with serve(Endpoint(), tenants=path) as s:
        answering = asyncio.Event()

        async def answer_never(*_):
            answering.set()
            await asyncio.Event().wait()

        fallback = s.router._table._shared.fallback
        monkeypatch.setattr(fallback, "_answer", answer_never)
        first = s.stub.Generate(prompt())
        await answering.wait()
        with pytest.raises(ResourceExhausted) as caught:
            await s.ask(prompt())
        first.cancel()
    assert caught.value.field == "max_concurrent"


async def test_a_missing_key_is_told_at_start(tmp_path):
    settings = RouterSettings(
        model=str(write_model_folder(tmp_path / "tiny")),
        fallback_url="http://other/v1",
        fallback_api_key_env="BATON_TEST_NO_SUCH_KEY",
    )
    with pytest.raises(StartupError, match="BATON_TEST_NO_SUCH_KEY is not set"):
        Router(settings)
