"""A stack of fake services: it becomes ready, reports what dies, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import psutil
import pytest

from client.launcher import Stack
from core.errors import StartupError
from tests.client.builders import fake_plan


@contextlib.asynccontextmanager
async def stack_of(tmp_path, router=None, *workers):
    """A stack that is not started yet and is stopped at the end; `said` are its lines."""
    said: list[str] = []
    others = psutil.Process().children(recursive=True)  # of other tests in this process
    stack = Stack(fake_plan(router, *workers), tmp_path, said.append)
    try:
        yield stack, said
    finally:
        await stack.stop()
        assert set(psutil.Process().children(recursive=True)) <= set(others)


def child_of(stack, name):
    return next(child for child in stack._children if child.name == name)


async def eventually(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_start_returns_when_the_router_knows_every_worker(tmp_path):
    async with stack_of(tmp_path, None, [], ["--chatty"]) as (stack, _):
        ready = await stack.start()
        assert ready.address.startswith("127.0.0.1:")
        assert ready.model == "tiny"


async def test_start_waits_for_a_worker_that_the_router_does_not_know(tmp_path):
    async with stack_of(tmp_path, ["--router-of", "0"], []) as (stack, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stack.start(), 1.5)


async def test_the_error_line_of_a_failing_child_is_the_error(tmp_path):
    worker = ["--say", "error: model folder /x does not exist", "--exit-code", "1"]
    async with stack_of(tmp_path, ["--never-ready"], worker) as (stack, said):
        with pytest.raises(StartupError) as caught:
            await stack.start()
    assert str(caught.value) == "prefill-0: model folder /x does not exist"
    assert said == []


async def test_the_log_of_a_child_that_gives_no_reason_is_shown(tmp_path):
    worker = ["--say", "Segmentation fault", "--exit-code", "3"]
    async with stack_of(tmp_path, ["--never-ready"], worker) as (stack, said):
        with pytest.raises(StartupError, match="prefill-0: exited with code 3 before it was ready"):
            await stack.start()
    assert said == ["prefill-0 | Segmentation fault"]


async def test_a_worker_that_dies_later_is_reported_and_serving_goes_on(tmp_path):
    async with stack_of(tmp_path, None, [], []) as (stack, said):
        await stack.start()
        child_of(stack, "prefill-0").send_signal(signal.SIGKILL)
        ending = asyncio.create_task(stack.until_router_ends())
        await eventually(lambda: said)
        assert said[0].startswith("prefill-0 killed by SIGKILL: ")
        assert not ending.done()
        ending.cancel()


async def test_the_death_of_the_router_is_told(tmp_path):
    router = ["--router-of", "1", "--say", "error: out of luck"]
    async with stack_of(tmp_path, router, []) as (stack, _):
        await stack.start()
        child_of(stack, "router").send_signal(signal.SIGKILL)
        assert await stack.until_router_ends() == "router killed by SIGKILL: out of luck"


async def test_a_child_that_ignores_sigterm_is_killed_after_3_s(tmp_path):
    async with stack_of(tmp_path, None, ["--ignores-sigterm"]) as (stack, said):
        await stack.start()
        async with asyncio.timeout(60):
            await stack.stop()
        assert said == ["killing prefill-0: still running 3 s after SIGTERM"]


async def test_cancelling_stop_cuts_the_grace_short(tmp_path, monkeypatch):
    monkeypatch.setattr("client.launcher.STOP_GRACE_S", 600.0)
    others = set(psutil.Process().children(recursive=True))
    async with stack_of(tmp_path, None, ["--ignores-sigterm"]) as (stack, _):
        await stack.start()
        stopping = asyncio.create_task(stack.stop())
        await asyncio.sleep(0.1)
        stopping.cancel()
        await asyncio.wait((stopping,))
        await eventually(lambda: set(psutil.Process().children(recursive=True)) <= others)
