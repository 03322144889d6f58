"""Requests leave nothing to the garbage collector (tests/garbage.py)."""

from __future__ import annotations

from contextlib import suppress

import grpc
import openai
import pytest

from core.errors import InvalidArgument
from tests.garbage import left_behind
from tests.router.fakes import Script
from tests.router.stack import prompt, wait_for

REPLY = [*range(2, 20), 0]


MODULES = ("router.", "core.", "uvicorn.")


async def left_by(s, ask, caplog) -> list[type]:
    async def work() -> None:
        await ask(s)
        await wait_for(lambda: s.stack.router._table.num_running == 0)

    return await left_behind(work, MODULES, caplog)


async def grpc_call(s, n=1, **sampling) -> None:
    request = prompt("Where?", **sampling)
    request.n = n
    with suppress(grpc.RpcError):
        async for _ in s.stack.stub.Generate(request):
            pass


async def left_grpc_call(s) -> None:
    call = s.stack.stub.Generate(prompt("Where?"))
    await call.read()
    call.cancel()


async def completion(s, **parameters) -> None:
    with suppress(openai.APIError):
        answer = await s.complete(**parameters)
        if parameters.get("stream"):
            async for _ in answer:
                pass


async def left_completion(s, **parameters) -> None:
    answer = await s.complete(stream=True, **parameters)
    async for _ in answer:
        break
    await answer.close()


KINDS = {
    "grpc": grpc_call,
    "grpc n": lambda s: grpc_call(s, n=3),
    "grpc logprobs": lambda s: grpc_call(s, logprobs=2),
    "grpc stop": lambda s: grpc_call(s, stop=["of"]),
    "grpc refused": lambda s: grpc_call(s, temperature=-1),
    "grpc left": left_grpc_call,
    "http": completion,
    "http stream": lambda s: completion(s, stream=True),
    "http n": lambda s: completion(s, stream=True, n=2),
    "http prompts": lambda s: completion(s, stream=True, prompt=["a", "b"]),
    "http logprobs": lambda s: completion(s, logprobs=2, echo=True),
    "http refused": lambda s: completion(s, temperature=-1),
    "http prompts refused": lambda s: completion(s, prompt=["a", "b"], temperature=-1),
    "http left": left_completion,
    "http prompts left": lambda s: left_completion(s, prompt=["a", "b"]),
    "http chat": lambda s: s.chat(),
    "http model": lambda s: s.http.get("/v1/models/tiny"),
    "http not found": lambda s: s.http.get("/nothing"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_of_a_request(serve, caplog, kind):
    async with serve() as s:
        assert await left_by(s, KINDS[kind], caplog) == []


@pytest.mark.parametrize("kind", ["grpc", "http stream"])
async def test_of_one_that_fails(serve, caplog, kind):
    script = Script(REPLY, num_decode_tokens=3, fault=InvalidArgument("out of luck"))
    async with serve(script=script) as s:
        assert await left_by(s, KINDS[kind], caplog) == []


@pytest.mark.parametrize("kind", ["grpc", "http stream"])
async def test_of_one_whose_time_is_over(serve, caplog, kind):
    script = Script(REPLY, num_decode_tokens=3)
    async with serve(script=script, request_timeout_s=0.3) as s:
        assert await left_by(s, KINDS[kind], caplog) == []


@pytest.mark.parametrize("kind", ["grpc", "http stream"])
async def test_of_one_that_no_pod_can_serve(serve, caplog, kind):
    async with serve(num_prefill=0, worker_wait_s=0.0) as s:
        assert await left_by(s, KINDS[kind], caplog) == []
