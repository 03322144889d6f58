"""Requests leave nothing to the garbage collector, which seldom looks at old objects.

An object that waits for it keeps a request's texts, tokens and prompt in memory: with many requests
a second that is gigabytes. So nothing may hold itself, by whatever way.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import suppress

import grpc
import openai
import pytest

from core.errors import InvalidArgument
from tests.router.fakes import Script
from tests.router.stack import prompt, wait_for

REPLY = [*range(2, 20), 0]


def num_held() -> Counter[type]:
    """How many objects of the router's classes there are that the collector has not put aside."""
    # By type(): isinstance would ask every object of the process for its __class__, and some
    # answer with a warning.
    classes = (type(each) for each in gc.get_objects())
    own = ("router.", "core.", "uvicorn.")
    return Counter(each for each in classes if str(each.__module__).startswith(own))


NUM_REQUESTS = 8


async def left_behind(s, caplog, ask) -> list[type]:
    """Classes of which there is an object for each request when all requests are over."""
    await ask(s)
    await wait_for(lambda: s.stack.router._table.num_running == 0)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(NUM_REQUESTS):
            await ask(s)
        for _ in range(30):
            caplog.clear()  # or it would keep tracebacks
            left = [each for each, count in num_held().items() if count >= NUM_REQUESTS]
            if not left:
                break
            await asyncio.sleep(0.1)
        return left
    finally:
        gc.enable()
        gc.unfreeze()


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


async def left_completion(s) -> None:
    answer = await s.complete(stream=True)
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
    "http left": left_completion,
    "http chat": lambda s: s.chat(),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_of_a_request(serve, caplog, kind):
    async with serve() as s:
        assert await left_behind(s, caplog, KINDS[kind]) == []


@pytest.mark.parametrize("kind", ["grpc", "http stream"])
async def test_of_one_that_fails(serve, caplog, kind):
    script = Script(REPLY, num_decode_tokens=3, fault=InvalidArgument("out of luck"))
    async with serve(script=script) as s:
        assert await left_behind(s, caplog, KINDS[kind]) == []


@pytest.mark.parametrize("kind", ["grpc", "http stream"])
async def test_of_one_whose_time_is_over(serve, caplog, kind):
    script = Script(REPLY, num_decode_tokens=3)
    async with serve(script=script, request_timeout_s=0.3) as s:
        assert await left_behind(s, caplog, KINDS[kind]) == []
