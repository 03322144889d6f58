"""Moving KV blocks between two processes of one machine.

sizes    each transport and a raw Python socket, for blocks from 32 KiB (what a layout with one
         piece a layer would send) to 2 MiB (what the block layout is made for), few and many
tuning   TCP: UCX with its own settings and with Baton's, and fixed socket buffers
pods     UCX where the owner's PID namespace is another one, as it is between two pods that do
         not share it: UCX cannot use CMA and falls back to TCP without a word

Every read is measured right beside one core's memcpy of as many blocks, in the same shuffled
order, to the same memory; both processes' pools are backed by huge pages where the machine has
them, and every page was touched before. All ways of a section take turns. A figure is the
median of the repetitions, `of_memcpy` the median of their ratios.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterable, Sequence

from bench.kv_ways import SOCKET, ReadyWay, Turn, Way, ready_way
from bench.report import Reporter, argument_parser
from kvtransfer.select import installed_transports

KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 128 * MIB
LARGE = 2 * MIB
BLOCK_SIZES = (32 * KIB, 256 * KIB, LARGE)
NUM_DESCRIPTORS = (1, 16, 64, 512, 4096)
REPETITIONS = 15
GOAL_OF_MEMCPY = 0.9

OVER_TCP = {"UCX_TLS": "tcp,self"}
UCX_OWN_SETTINGS = {
    "UCX_TCP_TX_SEG_SIZE": "8k",
    "UCX_TCP_RX_SEG_SIZE": "64k",
    "UCX_TCP_SNDBUF": "auto",
    "UCX_TCP_RCVBUF": "auto",
}

NIXL = Way("nixl", "nixl")
UCXX = Way("ucxx", "ucxx")
TCP = Way("tcp", "tcp")
RAW_SOCKET = Way("socket", SOCKET)
TUNING = (
    Way("nixl, UCX's own settings", "nixl", {**OVER_TCP, **UCX_OWN_SETTINGS}),
    Way("nixl, Baton's settings", "nixl", OVER_TCP),
    Way("ucxx, UCX's own settings", "ucxx", {**OVER_TCP, **UCX_OWN_SETTINGS}),
    Way("ucxx, Baton's settings", "ucxx", OVER_TCP),
    TCP,
    RAW_SOCKET,
    Way("socket, buffers of 208 KiB", SOCKET, buffer_bytes=208 * KIB),
    Way("socket, buffers of 4 MiB", SOCKET, buffer_bytes=4 * MIB),
)
APART = (
    Way("nixl, PID namespaces apart", "nixl", is_apart=True),
    Way("ucxx, PID namespaces apart", "ucxx", is_apart=True),
    Way("tcp, PID namespaces apart", "tcp", is_apart=True),
)


class KvBench:
    """Measures section by section and reports each row as it is known."""

    def __init__(self, reporter: Reporter, num_repetitions: int) -> None:
        self._reporter = reporter
        self._num_repetitions = num_repetitions

    def sizes(self) -> None:
        ways = _possible((NIXL, UCXX, TCP, RAW_SOCKET))
        for block_bytes in BLOCK_SIZES:
            of_memcpy = self._measure("sizes", ways, block_bytes, NUM_DESCRIPTORS)
            if block_bytes == LARGE and NIXL.name in of_memcpy:
                self._reporter.check(
                    "nixl, 2 MiB blocks", of_memcpy[NIXL.name], "of memcpy", f">= {GOAL_OF_MEMCPY}"
                )

    def tuning(self) -> None:
        self._measure("tuning", _possible(TUNING), LARGE)

    def pods(self) -> None:
        try:
            self._measure("pods", _possible((NIXL, *APART)), LARGE)
        except PermissionError:
            self._reporter.row(section="pods", way="PID namespaces cannot be made here")

    def _measure(
        self, section: str, ways: Iterable[Way], block_bytes: int, counts: Sequence[int] = ()
    ) -> dict[str, float]:
        """Rows for some numbers of blocks and for the whole pool; returns the latter's
        `of_memcpy` by way."""
        num_blocks = POOL_BYTES // block_bytes
        of_memcpy = {}
        with contextlib.ExitStack() as stack:
            ready = [stack.enter_context(ready_way(way, (num_blocks, block_bytes))) for way in ways]
            for count in [*(count for count in counts if count < num_blocks), num_blocks]:
                for way, turns in self._turns(ready, count):
                    of_memcpy[way.name] = self._report(section, way, (count, block_bytes), turns)
        return of_memcpy

    def _turns(self, ready: list[ReadyWay], count: int) -> list[tuple[Way, list[Turn]]]:
        rounds = [[way.turn(count) for way in ready] for _ in range(self._num_repetitions)]
        return [(ready[i].way, [turns[i] for turns in rounds]) for i in range(len(ready))]

    def _report(self, section: str, way: Way, shape: tuple[int, int], turns: list[Turn]) -> float:
        count, block_bytes = shape
        pull_s = statistics.median(turn.pull_s for turn in turns)
        of_memcpy = statistics.median(turn.memcpy_s / turn.pull_s for turn in turns)
        self._reporter.row(
            section=section,
            way=way.name,
            over=turns[-1].route,
            block_kib=block_bytes // KIB,
            num_blocks=count,
            ms=pull_s * 1e3,
            gb_per_s=count * block_bytes / pull_s / 1e9,
            of_memcpy=of_memcpy,
        )
        return of_memcpy


def _possible(ways: Iterable[Way]) -> list[Way]:
    """Those of them that this installation has the libraries for."""
    return [way for way in ways if way.transport in (SOCKET, *installed_transports())]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions; sizes only")
    arguments = parser.parse_args()
    reporter = Reporter("kv", arguments.json)
    bench = KvBench(reporter, 5 if arguments.quick else REPETITIONS)
    bench.sizes()
    if not arguments.quick:
        bench.tuning()
        bench.pods()
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
