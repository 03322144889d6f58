"""What goes wrong, as OpenAI's client sees it."""

import asyncio

import openai
import pytest

from core.errors import ResourceExhausted, Unavailable
from tests.router.fakes import Script
from tests.router.stack import REPLY, wait_for

HANGING = {"num_decode_tokens": 3}


async def test_a_wrong_value_is_a_bad_request_that_names_the_parameter(serve):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError) as caught:
            await s.chat(logprobs=True, top_logprobs=21)
    error = caught.value
    assert (error.param, error.code, error.type) == (
        "top_logprobs",
        "invalid_value",
        "invalid_request_error",
    )
    assert error.body["message"] == "top_logprobs must be from 0 to 20, got 21"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"content": "x" * 200}, "messages"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"priority": 1001}}, "priority"),
    ],
)
async def test_the_parameter_has_the_name_that_the_client_gave(serve, parameters, param):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError, match=f"- {param}") as caught:
            await s.chat(**parameters)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [[1, 300], [[1], [2**40]], ["a", ""], ["a"] * 129, [-1]])
async def test_a_wrong_prompt_among_others_refuses_the_request(serve, prompt):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError, match="prompt") as caught:
            await s.complete(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"content": "x" * 200}, "messages"),
        ({"max_completion_tokens": 128}, "max_completion_tokens"),
    ],
)
async def test_more_than_the_context_has_the_code_that_openai_gives_it(serve, parameters, param):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError) as caught:
            await s.chat(**parameters)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/x-www-form-urlencoded", 415),
        ("text/plain; charset=utf-8", 415),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
    ],
)
async def test_a_body_that_says_it_is_no_json_is_refused(serve, content_type, status):
    async with serve() as s:
        response = await s.http.post(
            "/v1/completions",
            content=b'{"prompt": "a", "max_tokens": 1}',
            headers={"content-type": content_type},
        )
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_a_model_that_is_not_served_is_not_found(serve):
    async with serve() as s:
        with pytest.raises(openai.NotFoundError) as caught:
            await s.openai.completions.create(model="gpt-9", prompt="a")
        with pytest.raises(openai.NotFoundError):
            await s.openai.models.retrieve("gpt-9")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_unknown_paths_and_methods_are_json_errors(serve):
    async with serve() as s:
        unknown = await s.http.get("/v1/audio")
        wrong = await s.http.get("/v1/completions")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_an_id_in_use_for_something_else_is_a_conflict(serve):
    async with serve() as s:
        await s.complete("one", extra_headers={"x-request-id": "id"})
        with pytest.raises(openai.ConflictError) as caught:
            await s.complete("two", extra_headers={"x-request-id": "id"})
    assert (caught.value.param, caught.value.code) == ("x-request-id", "request_id_in_use")
    assert caught.value.body["message"].startswith("x-request-id 'id' is in use")


@pytest.mark.parametrize(
    ("first", "second"),
    [(["a", "b"], "c"), (["a", "b"], "a"), ("a", ["a", "b"]), (["a", "b"], ["a", "c"])],
)
async def test_an_id_in_use_for_other_prompts_is_a_conflict(serve, first, second):
    async with serve() as s:
        await s.complete(first, extra_headers={"x-request-id": "id"})
        with pytest.raises(openai.ConflictError):
            await s.complete(second, extra_headers={"x-request-id": "id"})


async def test_an_id_of_one_prompt_of_several_is_free(serve):
    async with serve() as s:
        both = [await s.complete(["a", "b"], extra_headers={"x-request-id": "id"}) for _ in "12"]
        other = await s.complete("c", extra_headers={"x-request-id": "id/0"})
        assert len(s.stack.decodes[0].dispatches) == 3
    assert (both[0].choices, len(other.choices)) == (both[1].choices, 1)


async def test_no_room_is_a_rate_limit_with_the_time_to_wait(serve):
    script = Script(list(REPLY), **HANGING, fault=ResourceExhausted("full", retry_after_s=0.2))
    async with serve(script=script) as s:
        with pytest.raises(openai.RateLimitError) as caught:
            await s.complete()
    assert caught.value.type == "rate_limit_error"
    assert caught.value.response.headers["retry-after"] == "1"


async def test_no_worker_is_service_unavailable(serve):
    async with serve(worker_wait_s=0.0) as s:
        await s.stack.decodes[0].stop()
        with pytest.raises(openai.InternalServerError) as caught:
            for _ in range(100):
                await s.complete()
    assert caught.value.status_code == 503
    assert caught.value.code == "unavailable"
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_timeout_is_the_clients_choice(serve):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        with pytest.raises(openai.InternalServerError) as caught:
            await s.complete(extra_headers={"x-request-timeout": "0.3"})
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_who_joins_a_request_has_a_timeout_of_their_own(serve, is_stream):
    async with serve(script=Script(list(REPLY), **HANGING)) as s:
        named = {"x-request-id": "mine"}
        first = asyncio.create_task(s.complete(extra_headers=named))
        await wait_for(lambda: s.stack.router._table.num_running == 1)
        with pytest.raises(openai.APIError) as caught:
            short = named | {"x-request-timeout": "0.3"}
            answer = await s.complete(extra_headers=short, stream=is_stream)
            async for _ in answer:
                pass
        assert caught.value.code == "timeout"
        assert not first.done()
        first.cancel()


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "inf", "1e9"])
async def test_a_wrong_timeout_is_refused(serve, timeout):
    async with serve() as s:
        with pytest.raises(openai.BadRequestError, match="must be a number of seconds") as caught:
            await s.complete(extra_headers={"x-request-timeout": timeout})
    assert caught.value.param == "x-request-timeout"


async def test_a_bug_is_a_500_that_says_nothing_of_it(serve, monkeypatch):
    async with serve() as s:
        monkeypatch.setattr(s.stack.router._table, "follow", None)
        with pytest.raises(openai.InternalServerError, match="under request id mine") as caught:
            await s.complete(extra_headers={"x-request-id": "mine"})
    assert (caught.value.status_code, caught.value.code) == (500, "internal_error")
    assert "NoneType" not in str(caught.value)


async def test_every_reply_has_the_request_id(serve):
    async with serve() as s:
        ids = [
            (await s.http.request(method, path, headers={"x-request-id": "mine"})).headers
            for method, path in [("GET", "/health"), ("GET", "/no"), ("POST", "/v1/completions")]
        ]
        drawn = await s.openai.models.with_raw_response.list()
        wrong = await s.http.get("/health", headers={"x-request-id": "a b"})
    assert [headers["x-request-id"] for headers in ids] == ["mine"] * 3
    assert len(drawn.headers["x-request-id"]) == 32
    assert wrong.json()["error"]["param"] == "x-request-id"
    assert wrong.headers["x-request-id"] != "a b"


async def test_unavailable_says_what_to_do_and_the_log_says_where_it_failed(serve, caplog):
    fault = Unavailable("worker decode-0 at 10.0.0.7:50052 cannot be reached")
    async with serve(script=Script(list(REPLY), **HANGING, fault=fault)) as s:
        with pytest.raises(openai.InternalServerError) as caught:
            await s.complete()
    told = caught.value.body["message"]
    assert told == "the workers that served the request have failed; send it again"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert "10.0.0.7:50052" in caplog.text
