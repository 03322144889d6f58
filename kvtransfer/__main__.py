"""`python -m kvtransfer`: which transports work on this machine, and how fast.

info                       the transports and whether they are installed
measure [--transport T]    reads a pool of another process, checks every block, and
                           compares the speed with one core's memcpy
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from core.errors import BatonError
from kvtransfer.measure import local_pair
from kvtransfer.routes import ucx_log
from kvtransfer.select import AUTO, TRANSPORTS, choose_transport, installed_transports

NOTES = {
    "nixl": "nixl-cu12 or nixl-cu13",
    "ucxx": "ucxx-cu12 or ucxx-cu13; host memory only",
    "tcp": "host memory only",
}


def main() -> int:
    """The exit code: 1 when a transport does not start or moves wrong bytes."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtransfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info")
    measure = commands.add_parser("measure")
    measure.add_argument("--transport", choices=[AUTO, *TRANSPORTS], default=AUTO)
    measure.add_argument("--num-blocks", type=int, default=64)
    measure.add_argument("--block-bytes", type=int, default=2 << 20)
    measure.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.command == "info":
        for name in TRANSPORTS:
            state = "installed" if name in installed_transports() else "not installed"
            _say(f"{name:<4}  {state:<13}  {NOTES[name]}")
        return 0
    try:
        asyncio.run(_measure(arguments))
    except BatonError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _measure(arguments: argparse.Namespace) -> None:
    name = choose_transport() if arguments.transport == AUTO else arguments.transport
    shape = (arguments.num_blocks, arguments.block_bytes)
    num_bytes = arguments.num_blocks * arguments.block_bytes
    pulls: list[float] = []
    memcpys: list[float] = []
    with ucx_log() as log:
        async with local_pair(name, *shape) as pair:
            await pair.test()
            for _ in range(arguments.repetitions):
                pulls.append(await pair.pull())
                memcpys.append(pair.memcpy())
        routes = log.routes()
    pull_s, memcpy = statistics.median(pulls), statistics.median(memcpys)
    _say(f"{shape[0]} blocks of {shape[1]} bytes over {name}, {' and '.join(routes) or 'sockets'}")
    _say(f"{num_bytes / pull_s / 1e9:.2f} GB/s, {memcpy / pull_s:.2f} of memcpy")


def _say(line: str) -> None:
    print(line)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
