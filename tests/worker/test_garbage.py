"""Requests leave nothing to workers' garbage collector (tests/garbage.py)."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from core.errors import BatonError, InvalidArgument
from kvtransfer.imports import _End
from tests.engine.harness import make_prompt
from tests.garbage import left_behind
from tests.worker.pair import Pair, pair

MODULES = ("worker.", "engine.", "kvtransfer.", "prefill_svc.", "decode_svc.", "core.")
numbers = itertools.count()


async def handed_off(both: Pair, **fields: object) -> None:
    number = next(numbers)
    await both.generate_choices(make_prompt(70, number), f"r{number}", **fields)


async def local(both: Pair) -> None:
    number = next(numbers)
    result = await both.send_local(both.dispatch(make_prompt(40, number), f"r{number}"))
    await result.ended.wait()


async def aborted(both: Pair) -> None:
    number = next(numbers)
    dispatch = both.dispatch(make_prompt(40, number), f"r{number}", max_tokens=100)
    result = await both.send(dispatch)
    await result.first_token.wait()
    both.abort(dispatch.request_id)


async def refused(both: Pair) -> None:
    with suppress(BatonError):
        await both.send(both.dispatch([], f"r{next(numbers)}"))


KINDS: dict[str, Callable[[Pair], Awaitable[None]]] = {
    "handed off": handed_off,
    "choices": lambda both: handed_off(both, n=3),
    "logprobs": lambda both: handed_off(both, sampling={"logprobs": 2}, prompt_logprobs=1),
    "local": local,
    "aborted": aborted,
    "refused": refused,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_of_a_request(
    folder: Path, scheduling: None, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with pair(folder) as both:

        async def work() -> None:
            await KINDS[kind](both)
            await both.until_idle()

        # Decode remembers for a while how imports have ended, and `both` what was answered.
        remembered = (_End, InvalidArgument)
        assert await left_behind(work, MODULES, caplog, remembered) == []
