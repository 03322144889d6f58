"""Who may call: API keys for HTTP and gRPC, tenants, and origins of web pages."""

import grpc
import openai
import pytest

from baton.v1 import inference_pb2
from core.api_keys import ApiKeys, read_api_keys
from core.errors import StartupError, Unauthenticated
from tests.router.stack import prompt

KEYS = "# ours\nsecret-1 gold  # the first\n\nsecret-2\n"


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def test_a_key_stands_for_its_tenant(keys_file):
    keys = ApiKeys(read_api_keys(keys_file))
    assert keys.tenant("Bearer secret-1") == "gold"
    assert keys.tenant("bearer  secret-2 ") == "default"


def test_without_keys_everybody_is_the_default_tenant():
    assert ApiKeys({}).tenant(None) == "default"
    assert ApiKeys({}).tenant("Bearer whatever") == "default"


@pytest.mark.parametrize(
    "header",
    [None, "", "secret-1", "Basic secret-1", "Bearer", "Bearer secret", "Bearer schlüssel"],
)
def test_anything_else_is_refused_without_showing_it(keys_file, header):
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys(read_api_keys(keys_file)).tenant(header)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "are empty: nobody could call"),
        ("# none\n", "are empty: nobody could call"),
        ("a b c\n", "line 1, is not KEY or KEY TENANT"),
        ("a\nä\n", "line 2, is not KEY or KEY TENANT"),
        ("a x\na y\n", "line 2, repeats a key"),
    ],
)
def test_a_wrong_file_of_keys_is_a_startup_error(tmp_path, content, problem):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(StartupError, match=problem):
        read_api_keys(tmp_path / "keys")


def test_a_missing_file_of_keys_is_a_startup_error(tmp_path):
    with pytest.raises(StartupError, match="cannot be read"):
        read_api_keys(tmp_path / "keys")


async def test_http_calls_need_a_key(serve, keys_file):
    async with serve(api_keys=keys_file, api_key="secret-1") as s:
        assert (await s.complete(max_tokens=5)).choices[0].text == "Paris"
        with pytest.raises(openai.AuthenticationError) as caught:
            await s.openai.with_options(api_key="wrong").models.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")


async def test_health_and_metrics_need_none(serve, keys_file):
    async with serve(api_keys=keys_file) as s:
        statuses = [
            (await s.http.get(path)).status_code for path in ("/health", "/metrics", "/v1/models")
        ]
    assert statuses == [200, 200, 401]


async def test_grpc_calls_need_the_same_key(serve, keys_file):
    async with serve(api_keys=keys_file) as s:
        calls = (
            lambda **call: s.stack.stub.GetStatus(inference_pb2.GetStatusRequest(), **call),
            lambda **call: s.stack.stub.GetModel(inference_pb2.GetModelRequest(), **call),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await call(metadata=(("authorization", "Bearer secret-2"),))
        with pytest.raises(Unauthenticated):
            await s.stack.ask(prompt())
        answer = await s.stack.ask(prompt(), metadata=(("authorization", "Bearer secret-2"),))
    assert answer.text == "Paris, of course."


async def test_request_ids_of_two_tenants_are_apart(serve, keys_file):
    async with serve(api_keys=keys_file, api_key="secret-1") as s:
        other = s.openai.with_options(api_key="secret-2")
        headers = {"x-request-id": "one"}
        await s.complete("mine", extra_headers=headers)
        answer = await other.completions.create(model="tiny", prompt="yours", extra_headers=headers)
        assert len(s.stack.prefills[0].dispatches) == 2
    assert answer.id == "cmpl-one"


async def test_pages_of_chosen_origins_may_call(serve):
    ask = {"origin": "http://a", "access-control-request-method": "POST"}
    async with serve(cors_origins="http://a, http://b") as s:
        allowed = await s.http.options("/v1/chat/completions", headers=ask)
        refused = await s.http.options("/v1/models", headers=ask | {"origin": "http://c"})
        called = await s.http.get("/v1/models", headers={"origin": "http://b"})
    assert (allowed.status_code, refused.status_code) == (200, 400)
    assert refused.json()["error"]["code"] == "cors_refused"
    assert allowed.headers["access-control-allow-origin"] == "http://a"
    assert called.headers["access-control-allow-origin"] == "http://b"


async def test_by_default_no_page_may_call(serve):
    async with serve() as s:
        called = await s.http.get("/v1/models", headers={"origin": "http://a"})
    assert "access-control-allow-origin" not in called.headers
