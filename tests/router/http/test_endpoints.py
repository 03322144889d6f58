"""Models, tokenize and detokenize, health, metrics."""

import asyncio
import contextlib
import threading

import pytest
from prometheus_client import generate_latest

from baton.v1 import types_pb2
from core.chat_template import ChatTemplate
from core.errors import Unavailable
from router.http import app
from tests.router.fakes import Script
from tests.router.stack import PATIENCE_S, REPLY, wait_for


async def test_the_model_is_listed_with_the_context_that_workers_hold(serve):
    async with serve(served_model_name="owner/name") as s:
        (listed,) = (await s.openai.models.list()).data
        got = await s.openai.models.retrieve("owner/name")
    assert (got.id, got.object, got.owned_by) == ("owner/name", "model", "baton")
    assert got.max_model_len == 128
    assert listed == got


async def test_a_model_without_a_name_is_not_found(serve):
    async with serve() as s:
        response = await s.http.get("/v1/models/")
        literal = await s.http.get("/v1/models/{name:path}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    assert (literal.status_code, literal.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("num_messages", [1, 2000])
async def test_only_long_chats_are_worked_on_in_a_thread(serve, monkeypatch, num_messages):
    threads = set()
    for name in ("parse_body", "chat_job"):
        function = getattr(app, name)

        def noting(*args, function=function):
            threads.add(threading.current_thread())
            return function(*args)

        monkeypatch.setattr(app, name, noting)
    messages = [{"role": "user", "content": "hi"}] * num_messages
    async with serve() as s:
        render = s.stack.router._table._shared.tokenizer._template.render
        monkeypatch.setattr(ChatTemplate, "render", lambda _, given: noting(given, function=render))
        await s.http.post("/v1/chat/completions", json={"messages": messages})
    assert (threading.main_thread() in threads) == (num_messages == 1)


async def test_tokenize_and_detokenize_are_inverse(serve):
    text = "é<eos> 🎉"
    async with serve() as s:
        tokens = (await s.http.post("/tokenize", json={"prompt": text})).json()
        back = await s.http.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert tokens["count"] == len(tokens["tokens"]) == 8
    assert tokens["max_model_len"] == 128
    assert back.json() == {"prompt": text}


async def test_tokenize_applies_the_chat_template_to_messages(serve):
    messages = [{"role": "user", "content": "hi"}]
    async with serve() as s:
        tokens = (await s.http.post("/tokenize", json={"messages": messages})).json()
        answer = await s.chat("hi")
    assert tokens["count"] == answer.usage.prompt_tokens


@pytest.mark.parametrize("token_id", [-1, 300])
async def test_detokenize_refuses_what_is_no_token(serve, token_id):
    async with serve() as s:
        response = await s.http.post("/detokenize", json={"tokens": [1, token_id]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * 128}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 128}]}, "messages"),
        ("/detokenize", {"tokens": [1] * 128}, "tokens"),
    ],
)
async def test_no_more_is_tokenized_or_detokenized_than_a_prompt_may_have(serve, path, body, param):
    async with serve() as s:
        response = await s.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param


async def test_tokenizing_counts_as_a_request_of_the_tenant(serve, tmp_path):
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {requests_per_s: 0.001}")
    async with serve(tenants=path) as s:
        first = await s.http.post("/tokenize", json={"prompt": "a"})
        second = await s.http.post("/detokenize", json={"tokens": [1]})
    assert (first.status_code, second.status_code) == (200, 429)
    assert int(second.headers["retry-after"]) > 100


async def test_detokenizing_runs_beside_the_event_loop(serve, monkeypatch):
    threads = []
    async with serve() as s:
        tokenizer = s.stack.router._table._shared.tokenizer
        monkeypatch.setattr(
            tokenizer, "decode", lambda ids: threads.append(threading.current_thread()) or "text"
        )
        response = await s.http.post("/detokenize", json={"tokens": [1, 2]})
    assert response.json() == {"prompt": "text"}
    assert threads[0] is not threading.main_thread()


async def test_health_follows_the_workers(serve):
    async with serve() as s:
        healthy = await s.http.get("/health")
        await s.stack.decodes[0].stop()
        await wait_for(lambda: not s.stack.router._pool.is_ready)
        ill = await s.http.get("/health")
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert ill.status_code == 503


async def test_demand_is_that_of_the_whole_deployment(serve):
    async with serve() as s:
        for worker in (*s.stack.prefills, *s.stack.decodes):
            worker.record.load.CopyFrom(types_pb2.Load(running=3))
            await s.stack.registry.publish(worker.record)
        await wait_for_status(s, "/demand", 200)
        demand = (await s.http.get("/demand")).json()
    assert demand.keys() == {
        "prefill_prompts",
        "prefill_queued_tokens",
        "decode_sequences",
        "decode_blocks",
    }
    assert 0 < demand["prefill_prompts"] <= 3


async def test_metrics_count_requests_tokens_and_times(serve):
    expected = {
        'baton_requests_total{outcome="ok"} 3.0',
        'baton_requests_total{outcome="invalid_argument"} 1.0',
        "baton_prompt_tokens_total 8.0",
        "baton_cached_prompt_tokens_total 6.0",
        "baton_generation_tokens_total 71.0",
        "baton_time_to_first_token_seconds_count 3.0",
        "baton_e2e_request_latency_seconds_count 3.0",
        "baton_request_time_per_output_token_seconds_count 2.0",
        "baton_request_retries_total 0.0",
        "baton_inter_token_latency_seconds_count 67.0",
        "baton_requests_in_flight 0.0",
        'baton_worker_ready{role="decode",worker="decode-0"} 1.0',
        'baton_worker_queue_depth{role="prefill",worker="prefill-0"} 0.0',
        'baton_http_responses_total{status="200"} 3.0',
        'baton_http_responses_total{status="400"} 1.0',
    }
    async with serve() as s:
        await s.complete("Where?", n=2)
        await asyncio.gather(s.complete("a"), s.complete("b"))
        await s.http.post("/v1/completions", json={"prompt": "a", "temperature": -1})
        told = await metrics(s, expected)
    assert told >= expected


async def metrics(s, expected):
    """All lines, once `expected` are there: some things are counted behind an answer."""
    registry = s.stack.router._table._shared.metrics.registry
    with contextlib.suppress(TimeoutError):  # the lines show best what is missing
        await wait_for(lambda: expected <= set(generate_latest(registry).decode().splitlines()))
    return set((await s.http.get("/metrics")).text.splitlines())


async def wait_for_status(s, path, status):
    async with asyncio.timeout(PATIENCE_S):
        while (await s.http.get(path)).status_code != status:
            await asyncio.sleep(0.05)


async def test_metrics_count_prompts_and_attempts_of_failed_requests_too(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=0, fault=Unavailable("gone"))
    expected = {
        'baton_requests_total{outcome="unavailable"} 1.0',
        "baton_prompt_tokens_total 6.0",
        "baton_request_retries_total 2.0",
    }
    async with serve(script=script) as s:
        answer = await s.http.post("/v1/completions", json={"prompt": "Where?", "max_tokens": 20})
        told = await metrics(s, expected)
    assert answer.status_code == 503
    assert told >= expected
