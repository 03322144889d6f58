"""How long the router's event loop computes without a break, while long prompts come in.

The router runs here, on asyncio's own loop, whose callbacks are timed one by one in CPU time
of the loop's thread: what the machine does besides does not count. A callback that computes
for 5 ms keeps every other stream waiting for 5 ms.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.router_stacks import mock_workers
from core.rpc import settle_heap
from core.settings import load_settings
from router.app import Router
from router.settings import RouterSettings

STEP_MS = 5.0


class Stopwatch:
    """The longest callback so far."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def note(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)


@contextmanager
def timed_callbacks(stopwatch: Stopwatch) -> Iterator[None]:
    """Times every callback of asyncio loops in this process."""
    run = Handle._run

    def timed(handle: Handle) -> None:
        began_at = time.thread_time()
        try:
            run(handle)
        finally:
            stopwatch.note(time.thread_time() - began_at)

    Handle._run = timed  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Handle._run = run  # type: ignore[method-assign]


def longest_callback_s(model: Path, num_words: int, num_prompts: int) -> float:
    """The longest callback while `num_prompts` prompts of `num_words` words arrive beside 32
    running streams."""
    with mock_workers(model, STEP_MS) as redis_url:
        return asyncio.run(_measure(model, redis_url, num_words, num_prompts))


async def _measure(model: Path, redis_url: str, num_words: int, num_prompts: int) -> float:
    flags = ["--model", str(model), "--redis-url", redis_url, "--port", "0"]
    router = Router(load_settings(RouterSettings, "bench.router", flags))
    try:
        address = (await router.start()).grpc
        await router.wait_ready()
        settle_heap()
        # Once untimed: memory that is touched for the first time costs milliseconds.
        await _load(address, num_words, num_prompts=8)
        stopwatch = Stopwatch()
        with timed_callbacks(stopwatch):
            await _load(address, num_words, num_prompts)
        return stopwatch.longest_s
    finally:
        await router.stop()


async def _load(address: str, num_words: int, num_prompts: int) -> None:
    """Long prompts, which come at random, beside streams that run."""
    await asyncio.gather(
        _clients(address, requests=32, concurrency=32, tokens=600),
        _clients(address, requests=num_prompts, rate=8, tokens=1, words=num_words),
    )


async def _clients(address: str, **options: float) -> None:
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    argv = (sys.executable, "-m", "bench.stream_clients", "grpc", address, *flags)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError("the clients failed")
