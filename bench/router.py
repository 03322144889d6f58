"""What the router itself costs: CPU time of its process, before workers that compute nothing.

The workers speak the real protocol (bench/mock_workers.py), so the router does all of its work:
parse, tokenize, hash, route, demultiplex, detokenize, write. CPU time counts every thread of
the router, tokenizing included; wall clock is too noisy on shared machines. Beside it stand bare
servers, which write the same tokens and do no more, and a peer's router, which merely proxies the
same from a mock of the same pace. All run at once and take turns under load, round by round;
figures are medians of the rounds, and ratios and differences are taken within a round.

- streams: CPU per token with 256 streams at a decode step of 20 ms, over gRPC and over SSE.
  Two runs that differ in answer length alone; their difference is tokens. The goal is for the
  rounds' least, since what else the machine does only adds to what a token costs.
- requests: CPU of a whole streamed request of 64 tokens.
- rate: requests a second with answers of one token, and what the router, half busy, adds to the
  TTFT that the same clients see of the bare server (workers and Redis included). Half busy is
  less than half of the former rate: where 64 clients wait, each turn of the event loop serves
  many; a request that comes alone costs about twice as much CPU. So requests that come at random,
  few of them, tell first what one costs, and half a core's worth of them are sent then.
- long prompt: what tokenizing and hashing 8,000 tokens adds to TTFT, and the longest time for
  which the event loop computed without a break (CPU time) meanwhile: what others wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from bench.loop_stalls import longest_callback_s
from bench.report import Reporter, argument_parser
from bench.router_load import Load, TokenLoads, load, token_loads
from bench.router_stacks import (
    PEER,
    Measured,
    bare_server,
    baton_router,
    peer_python,
    peer_router,
)
from bench.stream_clients import WORDS
from bench.turns import in_turns, median_difference, median_ratio
from core.model_folder import ModelFolder
from core.tokenizer import Tokenizer
from engine.fetch_smollm2 import default_folder, fetch

T = TypeVar("T")

STEP_MS = 20.0
NUM_STREAMS = 256
LONG_PROMPT_TOKENS = 8000
KINDS = ("grpc", "sse")
_BUSY_SHARE = 0.5
GOAL_PER_TOKEN_US = {"grpc": "<= 27", "sse": "<= 12"}
GOAL_OF_BARE = {"grpc": "<= 0.5", "sse": "<= 2"}
"""Next to a server that only writes: on grpc.aio, or straight to the sockets."""


@dataclass(frozen=True)
class Scale:
    """How much to measure: the counts are those of one round."""

    num_rounds: int
    stream_tokens: tuple[int, int]
    num_requests: int
    num_short: int
    num_long: int


FULL = Scale(num_rounds=5, stream_tokens=(20, 200), num_requests=128, num_short=800, num_long=15)
QUICK = Scale(num_rounds=1, stream_tokens=(5, 55), num_requests=64, num_short=300, num_long=8)


@dataclass(frozen=True)
class Servers:
    """What takes turns."""

    router: Measured
    bare: dict[str, Measured]
    """By the clients' kind."""
    peer: Measured | None

    def of(self, kind: str) -> dict[str, Measured]:
        """Those that clients of one kind can ask."""
        found = {"router": self.router, "bare": self.bare[kind]}
        if kind == "sse" and self.peer is not None:
            found["peer"] = self.peer
        return found


@contextmanager
def running(model: Path, peer: Path | None) -> Iterator[Servers]:
    """Starts them all and warms them. `peer`: the Python of its environment; None: without."""
    with ExitStack() as stack:
        servers = Servers(
            router=stack.enter_context(baton_router(model, STEP_MS)),
            bare={kind: stack.enter_context(bare_server(kind, STEP_MS)) for kind in KINDS},
            peer=None if peer is None else stack.enter_context(peer_router(peer, STEP_MS)),
        )
        for kind in KINDS:
            for server in servers.of(kind).values():
                load(server, kind, requests=20, tokens=4)
        yield servers


class RouterBench:
    """The measurements of one run."""

    def __init__(self, reporter: Reporter, servers: Servers, scale: Scale) -> None:
        self._reporter = reporter
        self._servers = servers
        self._scale = scale

    def streams(self, kind: str) -> None:
        """CPU per token."""
        lengths = self._scale.stream_tokens
        loads = self._compare(
            [kind], lambda kind, server: token_loads(server, kind, NUM_STREAMS, lengths)
        )
        found = {key: [each.us_per_token for each in some] for key, some in loads.items()}
        ours, bare = found[kind, "router"], found[kind, "bare"]
        of_bare = median_ratio(ours, bare)
        least = TokenLoads.least_us(loads[kind, "router"])
        self._reporter.row(
            what="streams",
            kind=kind,
            cpu_us_per_token=median(ours),
            least_us_per_token=least,
            bare_us_per_token=median(bare),
            peer_us_per_token=_median_if_any(found.get((kind, "peer"))),
            of_bare=of_bare,
        )
        name = f"CPU per token, {NUM_STREAMS} {kind} streams"
        self._reporter.check(name, least, "us", GOAL_PER_TOKEN_US[kind])
        name = f"the same next to a bare server, {kind}"
        self._reporter.check(name, of_bare, "times", GOAL_OF_BARE[kind])

    def requests(self) -> None:
        """CPU of whole requests of 64 tokens."""
        whole = {"requests": self._scale.num_requests, "concurrency": 64, "tokens": 64}
        found = self._compare(
            KINDS, lambda kind, server: load(server, kind, **whole).cpu_us_per_request
        )
        peer = found.get(("sse", "peer"))
        for kind in KINDS:
            ours, bare = found[kind, "router"], found[kind, "bare"]
            self._reporter.row(
                what="requests of 64 tokens",
                kind=kind,
                cpu_us_per_request=median(ours),
                bare_us_per_request=median(bare),
                peer_us_per_request=_median_if_any(peer),
                of_bare=median_ratio(ours, bare),
            )
            if peer is not None:
                ratio = median_ratio(ours, peer)
                self._reporter.check(f"CPU of a request, {kind}", ratio, f"of {PEER}'s", "<= 1.5")

    def rate(self, kind: str) -> None:
        """Saturation with answers of one token, and TTFT while the router is half busy."""
        number = self._scale.num_short
        router, bare = self._servers.router, self._servers.bare[kind]
        full: list[Load] = []
        alone: list[Load] = []
        half: list[Load] = []
        beside: list[Load] = []
        for _ in range(self._scale.num_rounds):
            full.append(load(router, kind, requests=number, concurrency=64, tokens=1))
            few = {"requests": number // 8, "rate": full[-1].requests_per_s / 8, "tokens": 1}
            alone.append(load(router, kind, **few))
            rate = _BUSY_SHARE / alone[-1].cpu_us_per_request * 1e6
            half.append(load(router, kind, requests=number, rate=rate, tokens=1))
            beside.append(load(bare, kind, requests=number, rate=rate, tokens=1))
        self._reporter.row(
            what="answers of one token",
            kind=kind,
            requests_per_s=median(each.requests_per_s for each in full),
            cpu_us_per_request=median(each.cpu_us_per_request for each in full),
            cpu_us_of_one_alone=median(each.cpu_us_per_request for each in alone),
            requests_per_s_half_busy=median(each.requests_per_s for each in half),
            busy_share=median(each.cpu_s / each.seconds for each in half),
            ttft_p50_ms=median(_p50_ms(half)),
            ttft_p99_ms=median(_p99_ms(half)),
            bare_ttft_p50_ms=median(_p50_ms(beside)),
            bare_ttft_p99_ms=median(_p99_ms(beside)),
        )
        for name, added_ms, goal in (
            ("p50", median_difference(_p50_ms(half), _p50_ms(beside)), "<= 2.5"),
            ("p99", median_difference(_p99_ms(half), _p99_ms(beside)), "<= 10"),
        ):
            self._reporter.check(f"added TTFT {name}, half busy, {kind}", added_ms, "ms", goal)

    def long_prompt(self, words: int) -> None:
        """What a prompt of 8,000 tokens adds to TTFT."""
        router = self._servers.router
        paced = {"requests": self._scale.num_long, "rate": 10, "tokens": 1}
        found = in_turns(
            self._scale.num_rounds,
            {
                "short": lambda: load(router, "grpc", **paced),
                "long": lambda: load(router, "grpc", **paced, words=words),
            },
        )
        self._reporter.row(
            what=f"prompt of {LONG_PROMPT_TOKENS} tokens",
            kind="grpc",
            ttft_p50_ms=median(_p50_ms(found["long"])),
            cpu_us_per_request=median(each.cpu_us_per_request for each in found["long"]),
        )
        added_ms = median_difference(_p50_ms(found["long"]), _p50_ms(found["short"]))
        self._reporter.check(f"TTFT added by {LONG_PROMPT_TOKENS} tokens", added_ms, "ms", "<= 8")

    def _compare(
        self, kinds: Sequence[str], measure: Callable[[str, Measured], T]
    ) -> dict[tuple[str, str], list[T]]:
        """What `measure` finds of every server in turns, by the clients' kind and its name."""
        ways = {
            (kind, name): partial(measure, kind, server)
            for kind in kinds
            for name, server in self._servers.of(kind).items()
        }
        return in_turns(self._scale.num_rounds, ways)


def _p50_ms(loads: Sequence[Load]) -> list[float]:
    return [each.ttft_p50_ms for each in loads]


def _p99_ms(loads: Sequence[Load]) -> list[float]:
    return [each.ttft_p99_ms for each in loads]


def _median_if_any(values: Sequence[float] | None) -> float | None:
    return None if values is None else median(values)


def _long_prompt_words(model: Path) -> int:
    """How many of the clients' words make 8,000 tokens."""
    num_tokens = len(Tokenizer(ModelFolder.load(model)).encode(" ".join(WORDS * 50)))
    return round(LONG_PROMPT_TOKENS * 50 * len(WORDS) / num_tokens)


def run(reporter: Reporter, scale: Scale, with_peer: bool) -> None:
    model = fetch(default_folder())
    num_words = _long_prompt_words(model)
    with running(model, peer_python() if with_peer else None) as servers:
        bench = RouterBench(reporter, servers, scale)
        for kind in KINDS:
            bench.streams(kind)
        bench.requests()
        for kind in KINDS:
            bench.rate(kind)
        bench.long_prompt(num_words)
    stall_s = longest_callback_s(model, num_words, scale.num_rounds * scale.num_long)
    reporter.check(
        f"longest callback with prompts of {LONG_PROMPT_TOKENS} tokens",
        stall_s * 1e3,
        "ms of CPU",
        "<= 2",
    )


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests, for a first look")
    parser.add_argument("--no-peer", action="store_true", help=f"without {PEER} from PyPI")
    arguments = parser.parse_args()
    reporter = Reporter("router", arguments.json)
    run(reporter, QUICK if arguments.quick else FULL, not arguments.no_peer)
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
