"""Moving KV blocks between two processes of one machine: each transport, one core's memcpy,
and a raw Python socket, taking turns in the same run.

Two pools of 128 MiB are read whole, in a shuffled order: 64 blocks of 2 MiB, the shape that
the block layout is made for, and 4,096 of 32 KiB, what a layout with one piece a layer would
send. A figure is the median of the repetitions, and a ratio the median of their ratios; one
round before them is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from bench.report import Reporter, argument_parser
from kvtransfer.local_peer import LOOPBACK, HostPool
from kvtransfer.measure import LocalPair, local_pair, memcpy_s, ucx_log, ucx_route
from kvtransfer.nixl_library import installed_nixl

LARGE = (64, 2 << 20)
SMALL = (4096, 32 << 10)
REPETITIONS = 9
SEGMENT_BYTES = 1 << 20


async def run(reporter: Reporter) -> int:
    transports = ["nixl", "tcp"] if installed_nixl() else ["tcp"]
    with ucx_log() as log:
        for shape in (LARGE, SMALL):
            seconds = await measure(transports, shape)
            route = ucx_route(log)
            report(reporter, shape, seconds, route)
    return reporter.finish()


async def measure(transports: list[str], shape: tuple[int, int]) -> dict[str, list[float]]:
    """Seconds of every repetition for "memcpy", "socket" and each transport."""
    source, destination = HostPool(*shape), HostPool(*shape)
    source.fill(1)
    async with contextlib.AsyncExitStack() as stack:
        raw = stack.enter_context(raw_socket(shape))
        pairs: dict[str, LocalPair] = {}
        for transport in transports:
            pairs[transport] = await stack.enter_async_context(local_pair(transport, *shape))
            await pairs[transport].test()
        rounds = []
        for _ in range(1 + REPETITIONS):
            turn = {"memcpy": memcpy_s(source, destination)}
            turn["socket"] = raw_socket_s(raw, destination, shape)
            for name, pair in pairs.items():
                turn[name] = await pair.pull()
            rounds.append(turn)
    return {name: [turn[name] for turn in rounds[1:]] for name in rounds[0]}


def report(
    reporter: Reporter, shape: tuple[int, int], seconds: dict[str, list[float]], route: str | None
) -> None:
    """One row for each way to move the bytes; the check for the layout's own shape."""
    num_blocks, block_bytes = shape
    ratios = {
        name: statistics.median(
            memcpy / own for memcpy, own in zip(seconds["memcpy"], values, strict=True)
        )
        for name, values in seconds.items()
    }
    for name, values in seconds.items():
        reporter.row(
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            by=name,
            over=route if name == "nixl" else None,
            gb_per_s=num_blocks * block_bytes / statistics.median(values) / 1e9,
            of_memcpy=ratios[name],
        )
    if shape == LARGE and "nixl" in seconds:
        reporter.check(
            f"nixl over {route or 'an unknown route'}, 2 MiB blocks",
            ratios["nixl"],
            "of memcpy",
            ">= 0.7",
        )


@contextlib.contextmanager
def raw_socket(shape: tuple[int, int]) -> Iterator[socket.socket]:
    """A connection to a process that sends the pool for every byte that it gets."""
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_send_pools, args=(child_end, shape), daemon=True)
    process.start()
    try:
        with socket.create_connection((LOOPBACK, pipe.recv())) as connection:
            yield connection
    finally:
        process.kill()
        process.join()


def raw_socket_s(connection: socket.socket, pool: HostPool, shape: tuple[int, int]) -> float:
    """Seconds to receive the pool, block by block and at most a mebibyte at a time."""
    begin = time.perf_counter()
    connection.sendall(b"\x01")
    step = min(shape[1], SEGMENT_BYTES)
    with memoryview(pool.memory) as view:
        for offset in range(0, len(view), step):
            connection.recv_into(view[offset : offset + step], step, socket.MSG_WAITALL)
    return time.perf_counter() - begin


def _send_pools(pipe: Connection, shape: tuple[int, int]) -> None:
    pool = HostPool(*shape)
    pool.fill(1)
    step = min(shape[1], SEGMENT_BYTES)
    with socket.create_server((LOOPBACK, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection, memoryview(pool.memory) as view:
            while connection.recv(1):
                for offset in range(0, len(view), step):
                    connection.sendall(view[offset : offset + step])


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    return asyncio.run(run(Reporter("kv", arguments.json)))


if __name__ == "__main__":
    sys.exit(main())
