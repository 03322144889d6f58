"""Ways to move blocks between two processes, each set up in processes of its own.

UCX reads its settings once a process, so ways that differ in them cannot share one. A way that
is ready does nothing until it is asked; so several of them can take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from bench.raw_socket import socket_pair
from bench.relay import relay
from kvtransfer.local_peer import LocalPeer
from kvtransfer.measure import paired
from kvtransfer.routes import ucx_log

SOCKET = "socket"
CLONE_NEWPID = 0x20000000


@dataclass(frozen=True)
class Way:
    """How blocks are moved."""

    name: str
    transport: str
    """A transport of kvtransfer, or SOCKET."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of both processes."""
    is_apart: bool = False
    """Whether the owner of the blocks lives in a PID namespace of its own, as in another pod."""
    buffer_bytes: int | None = None
    """Of SOCKET: fixed socket buffers."""
    bits_per_s: float | None = None
    """Of tcp: the rate of a relay in between."""


@dataclass(frozen=True)
class Turn:
    """One read and, right beside it, one copy of as many bytes to the same places."""

    pull_s: float
    memcpy_s: float
    route: str | None
    """What UCX reads over, where it tells."""


class _Pair(Protocol):
    async def pull(self, num_blocks: int) -> float: ...

    def memcpy(self, num_blocks: int) -> float: ...


class ReadyWay:
    """A way with its processes running and connected."""

    def __init__(self, way: Way, pipe: Connection) -> None:
        self.way = way
        self._pipe = pipe
        self._is_copy_first = False

    def turn(self, num_blocks: int) -> Turn:
        """Reads so many blocks and copies as many; which comes first alternates."""
        self._is_copy_first = not self._is_copy_first
        self._pipe.send((num_blocks, self._is_copy_first))
        answer = self._pipe.recv()
        assert isinstance(answer, Turn)
        return answer


@contextlib.contextmanager
def ready_way(way: Way, shape: tuple[int, int]) -> Iterator[ReadyWay]:
    """Starts a way with pools of `shape`: number of blocks, bytes of one.

    Raises PermissionError when a PID namespace cannot be made here, EOFError when the way's
    process failed, which then has said why.
    """
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, way, shape))
    process.start()
    child_end.close()
    try:
        if (error := pipe.recv()) is not None:
            raise error
        yield ReadyWay(way, pipe)
    finally:
        pipe.close()
        process.join()


def _serve(pipe: Connection, way: Way, shape: tuple[int, int]) -> None:
    os.environ.update(way.env)
    try:
        asyncio.run(_take_turns(pipe, way, shape))
    except PermissionError as error:
        pipe.send(error)


async def _take_turns(pipe: Connection, way: Way, shape: tuple[int, int]) -> None:
    with ucx_log() as log:
        async with _open_pair(way, shape) as pair:
            await pair.pull(shape[0])
            pair.memcpy(shape[0])
            pipe.send(None)
            with contextlib.suppress(EOFError):
                while True:
                    num_blocks, is_copy_first = pipe.recv()
                    memcpy_s = pair.memcpy(num_blocks) if is_copy_first else 0.0
                    pull_s = await pair.pull(num_blocks)
                    memcpy_s = memcpy_s or pair.memcpy(num_blocks)
                    pipe.send(Turn(pull_s, memcpy_s, next(iter(log.routes()), None)))


@contextlib.asynccontextmanager
async def _open_pair(way: Way, shape: tuple[int, int]) -> AsyncIterator[_Pair]:
    if way.transport == SOCKET:
        with socket_pair(shape, way.buffer_bytes) as raw:
            yield raw
        return
    with contextlib.ExitStack() as stack:
        with _children_apart() if way.is_apart else contextlib.nullcontext():
            peer = LocalPeer(way.transport, "owner@1", shape, seed=0)
        stack.callback(peer.kill)
        if way.bits_per_s is not None:
            owner = (peer.descriptor.host, peer.descriptor.port)
            peer.descriptor.port = stack.enter_context(relay(owner, way.bits_per_s))
        async with paired(peer) as pair:
            await pair.test()
            yield pair


@contextlib.contextmanager
def _children_apart() -> Iterator[None]:
    """Children that are started meanwhile live in a PID namespace of their own, of which the
    first one is the init process; threads cannot be started meanwhile. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/pid").open() as own:
        _check(library.unshare(CLONE_NEWPID))
        try:
            yield
        finally:
            _check(library.setns(own.fileno(), CLONE_NEWPID))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
