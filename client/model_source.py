"""Finds the model that a local stack serves, fetching it first where that is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from client.processes import dying_with_parent
from core.errors import BatonError, StartupError
from core.model_folder import resolve_model

FETCH_DEFAULT = (sys.executable, "-P", "-m", "engine.fetch_smollm2")


@dataclass(frozen=True)
class ModelSource:
    """A model folder, and the name that it goes by if the folder's own is not it."""

    path: Path
    name: str | None = None


async def find_model(name_or_path: str | None, say: Callable[[str], None]) -> ModelSource:
    """The folder of a path or a hub name; without one, of SmolLM2-135M-Instruct.

    Fetching happens here, once, and not in every service. Raises StartupError.
    """
    if name_or_path is None:
        return ModelSource(await _fetch_default(say))
    return await _resolve_in_thread(name_or_path)


async def _resolve_in_thread(name_or_path: str) -> ModelSource:
    """`resolve_model` in a daemon thread: Ctrl-C does not wait for the end of a download."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[ModelSource] = loop.create_future()

    def settle(outcome: ModelSource | BatonError) -> None:
        if found.cancelled():
            return
        if isinstance(outcome, BatonError):
            found.set_exception(outcome)
        else:
            found.set_result(outcome)

    def resolve() -> None:
        outcome: ModelSource | BatonError
        try:
            is_folder = Path(name_or_path).expanduser().is_dir()
            path = resolve_model(name_or_path)
            outcome = ModelSource(path, None if is_folder else name_or_path)
        except BatonError as error:
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=resolve, daemon=True).start()
    return await found


async def _fetch_default(say: Callable[[str], None]) -> Path:
    """Runs the fetching tool, which has nothing to do from the second time on.

    It is a process of its own because converting weights needs torch's world, the launcher
    does not.
    """
    tool = await asyncio.create_subprocess_exec(
        *dying_with_parent(FETCH_DEFAULT),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert tool.stdout is not None and tool.stderr is not None
    last_line = ""
    try:
        async for raw in tool.stderr:
            last_line = raw.decode(errors="replace").rstrip()
            if not last_line.startswith("error: "):
                say(last_line)
        output = await tool.stdout.read()
        await tool.wait()
    finally:
        if tool.returncode is None:
            # As a Ctrl-C would: the tool removes what it had begun.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tool.pid, signal.SIGINT)
            await tool.wait()
    if tool.returncode != 0:
        reason = last_line.removeprefix("error: ") or f"exit code {tool.returncode}"
        raise StartupError(f"cannot fetch the default model: {reason}")
    return Path(output.decode().strip())
