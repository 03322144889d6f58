"""A whole stack on one machine: starts the processes of a plan, watches and stops them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.v1 import types_pb2
from client._async import AsyncBatonClient
from client.launch_plan import LaunchPlan
from client.processes import Child
from core.errors import StartupError, Unavailable

STOP_GRACE_S = 3.0
_POLL_INTERVAL_S = 0.1
_PROGRESS_INTERVAL_S = 5.0


@dataclass(frozen=True)
class ReadyStack:
    """Where requests can be sent, and which model answers.

    `http` is where the OpenAI API listens, if it does.
    """

    address: str
    model: str
    http: str | None = None


class Stack:
    """The running processes of one plan. `say` takes lines for the person who waits.

    `await start()`, then `await until_router_ends()`, and `await stop()` in any case.
    """

    def __init__(self, plan: LaunchPlan, log_dir: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._router = Child(plan.router, log_dir)
        self._children = [self._router, *(Child(spec, log_dir) for spec in plan.others)]
        self._waiting_for: list[str] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> ReadyStack:
        """Starts everything at once; returns when every worker can be given requests.

        Raises StartupError as soon as one process fails, with what it said.
        """
        for child in self._children:
            await child.start()
        becoming_ready = [asyncio.create_task(self._ready(child)) for child in self._children]
        progress = asyncio.create_task(self._report_progress())
        try:
            router_fields, *_ = await asyncio.gather(*becoming_ready)
            address = _address(router_fields)
            model = await self._wait_for_workers(address)
        except StartupError:
            self._show_unexplained()
            raise
        finally:
            for task in (progress, *becoming_ready):
                task.cancel()
            await asyncio.gather(progress, *becoming_ready, return_exceptions=True)
        self._watchers = [
            asyncio.create_task(self._report_end(child))
            for child in self._children
            if child is not self._router
        ]
        return ReadyStack(address, model, router_fields.get("http"))

    async def _ready(self, child: Child) -> dict[str, str]:
        self._waiting_for.append(child.name)
        fields = await child.ready()
        self._waiting_for.remove(child.name)
        return fields

    async def _report_progress(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            what = ", ".join(sorted(self._waiting_for)) or "the workers to reach the router"
            self._say(f"waiting for {what} ({time.monotonic() - started:.0f} s)")

    async def _wait_for_workers(self, address: str) -> str:
        """Until the router knows every worker as ready. Returns the model's name."""
        async with AsyncBatonClient(address, self._plan.api_key) as client:
            while True:
                for child in self._children:
                    if not child.is_running:
                        raise StartupError(f"{child.name}: {await child.last_words()}")
                try:
                    status = await client.status()
                except Unavailable:
                    pass  # dies or comes: its process tells which
                else:
                    is_ready = {
                        worker.id
                        for worker in status.workers
                        if worker.state == types_pb2.WORKER_STATE_READY
                    }
                    if self._plan.worker_ids <= is_ready:
                        return status.router.model
                await asyncio.sleep(_POLL_INTERVAL_S)

    def _show_unexplained(self) -> None:
        """The log's end of every process that ended without saying why."""
        for child in self._children:
            if not child.is_running and child.reported_error() is None:
                for line in child.log_tail():
                    self._say(f"{child.name} | {line}")

    async def _report_end(self, child: Child) -> None:
        ending = await child.exited()
        reason = child.reported_error() or f"its log is {child.log_path}"
        self._say(f"{child.name} {ending}: {reason}")

    async def until_router_ends(self) -> str:
        """Returns what ended the router. Other processes that end are only reported."""
        ending = await self._router.exited()
        reason = self._router.reported_error() or f"its log is {self._router.log_path}"
        return f"router {ending}: {reason}"

    async def stop(self) -> None:
        """Ends every process within 5 s: SIGTERM, a grace of 3 s, SIGKILL.

        What has a probe (Redis) serves the others, so it ends after them. Cancelling this,
        as a second Ctrl-C does, cuts the grace short.
        """
        for watcher in self._watchers:
            watcher.cancel()
        started = [child for child in self._children if child.is_started]
        try:
            await _terminate([child for child in started if not child.has_probe], self._say)
            await _terminate([child for child in started if child.has_probe], self._say)
        finally:
            for child in started:
                child.send_signal(signal.SIGKILL)  # also what it may have started itself
        for child in started:
            await child.close()


async def _terminate(children: list[Child], say: Callable[[str], None]) -> None:
    """SIGTERM and a wait of at most STOP_GRACE_S for the end of all."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    endings = [asyncio.create_task(child.exited()) for child in children]
    if not endings:
        return
    _, still_running = await asyncio.wait(endings, timeout=STOP_GRACE_S)
    if still_running:
        slow = ", ".join(child.name for child in children if child.is_running)
        say(f"killing {slow}: still running {STOP_GRACE_S:.0f} s after SIGTERM")
        for child in children:
            child.send_signal(signal.SIGKILL)
        await asyncio.wait(endings)


def _address(fields: dict[str, str]) -> str:
    address = fields.get("grpc")
    if address is None:
        raise StartupError(f"router: no grpc=HOST:PORT in its ready line, only {fields}")
    return address
