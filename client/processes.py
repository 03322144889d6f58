"""One child process of the launcher: started, awaited until ready, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import StartupError

_TAIL_LINES = 15
_ERROR_LINE = re.compile(r"(?:python -m \w+: )?error: (.+)")
_LAST_OUTPUT_S = 0.5
_DIE_WITH_PARENT = str(Path(__file__).with_name("_die_with_parent.py"))


@dataclass(frozen=True)
class ProcessSpec:
    """What to run.

    Without `probe`, the child says that it is ready by a line `ready key=value …` on its
    standard output; with one, it is ready when `probe` returns.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    probe: Callable[[], Awaitable[None]] | None = None


def dying_with_parent(argv: tuple[str, ...]) -> tuple[str, ...]:
    """`argv`, on Linux wrapped so that the process dies with the one that starts it.

    Start it from a thread that lives as long as the process: the death of the starting
    *thread* counts.
    """
    if sys.platform != "linux":
        return argv
    return (sys.executable, "-I", "-S", _DIE_WITH_PARENT, str(os.getpid()), *argv)


class Child:
    """A process in a group of its own, whose output goes to a log file.

    On Linux it dies with the launcher, however that ends.
    """

    def __init__(self, spec: ProcessSpec, log_dir: Path) -> None:
        self.name = spec.name
        self.log_path = log_dir / f"{spec.name}.log"
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._ready_fields: asyncio.Future[dict[str, str]] | None = None

    @property
    def has_probe(self) -> bool:
        return self._spec.probe is not None

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process. Raises StartupError when there is nothing to run."""
        argv = dying_with_parent(self._spec.argv)
        with self.log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._spec.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise StartupError(f"cannot run {argv[0]}: {error.strerror}") from error
        self._ready_fields = asyncio.get_running_loop().create_future()
        self._output = asyncio.create_task(self._copy_output())

    async def _copy_output(self) -> None:
        """Looks for the ready line, and keeps the pipe empty: no child blocks on its output."""
        assert self._process is not None and self._ready_fields is not None
        stdout = self._process.stdout
        assert stdout is not None
        with self.log_path.open("ab", buffering=0) as log:
            while line := await _read_line(stdout):
                log.write(line)
                if line.startswith(b"ready ") and not self._ready_fields.done():
                    pairs = line.decode(errors="replace").split()[1:]
                    fields = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                    self._ready_fields.set_result(fields)

    async def ready(self) -> dict[str, str]:
        """Waits until the child can be used; returns the pairs of its ready line.

        Raises StartupError with what the child said if it ends before.
        """
        assert self._ready_fields is not None
        is_ready = asyncio.shield(self._ready_fields)
        if self._spec.probe is not None:
            is_ready = asyncio.ensure_future(_no_fields(self._spec.probe))
        ending = asyncio.create_task(self.exited())
        try:
            await asyncio.wait((is_ready, ending), return_when=asyncio.FIRST_COMPLETED)
            if not is_ready.done():
                raise StartupError(f"{self.name}: {await self.last_words()}")
            return await is_ready
        finally:
            is_ready.cancel()
            ending.cancel()

    async def exited(self) -> str:
        """Waits for its end and says what it was."""
        assert self._process is not None
        code = await self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def last_words(self) -> str:
        """Why it ended: the child's own `error: …` line if it wrote one."""
        ending = await self.exited()
        return self.reported_error() or f"{ending} before it was ready; its log is {self.log_path}"

    def reported_error(self) -> str | None:
        """What the last `error: …` line of its log says, be it about its command line."""
        for line in reversed(self.log_tail()):
            if match := _ERROR_LINE.match(line):
                return match.group(1)
        return None

    def log_tail(self) -> list[str]:
        """The last lines of its log."""
        text = self.log_path.read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the whole group; that it is gone already is fine."""
        if self._process is not None:
            # Of a group of zombies, macOS says "not permitted".
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Waits for its end, which somebody has brought about, and for its last output."""
        await self.exited()
        if self._output is not None:
            # The pipe stays open when a process outside the group holds it: do not wait then.
            await asyncio.wait((self._output,), timeout=_LAST_OUTPUT_S)
            self._output.cancel()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a part of one that is longer than the buffer; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


async def _no_fields(probe: Callable[[], Awaitable[None]]) -> dict[str, str]:
    await probe()
    return {}
