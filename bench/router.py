"""What the router itself costs: CPU time of its process, before workers that compute nothing.

The workers speak the real protocol (bench/mock_workers.py), so the router does all of its work:
parse, tokenize, hash, route, demultiplex, detokenize, write. CPU time counts every thread of
the router, tokenizing included; wall clock is too noisy on shared machines.

- streams: CPU per token with 256 streams at a decode step of 20 ms, over gRPC and over SSE.
  Two runs that differ in answer length alone; their difference is tokens. Beside it, in the
  same way, a bare server on the same libraries that writes the same tokens and does no more.
- requests: CPU of a whole streamed request of 64 tokens, next to the bare server's, and of a
  peer's router that merely proxies the same between the same clients and a mock of the same pace.
- rate: requests a second with answers of one token, and what the router, half busy, adds to the
  TTFT that the same clients see of the bare server (workers and Redis included). Half busy is
  less than half of the former rate: where 64 clients wait, each turn of the event loop serves
  many; a request that comes alone costs about twice as much CPU. So requests that come at random,
  few of them, tell first what one costs, and half a core's worth of them are sent then.
- long prompt: what tokenizing and hashing 8,000 tokens adds to TTFT, and the longest time for
  which the event loop computed without a break (CPU time) meanwhile: what others wait for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.loop_stalls import longest_callback_s
from bench.report import Reporter, argument_parser
from bench.router_stacks import (
    PEER,
    Measured,
    bare_server,
    baton_router,
    peer_python,
    peer_router,
)
from bench.stream_clients import WORDS
from core.model_folder import ModelFolder
from core.tokenizer import Tokenizer
from engine.fetch_smollm2 import default_folder, fetch

STEP_MS = 20.0
NUM_STREAMS = 256
LONG_PROMPT_TOKENS = 8000
_BUSY_SHARE = 0.5
GOAL_PER_TOKEN_US = {"grpc": "<= 27", "sse": "<= 12"}
GOAL_OF_BARE = {"grpc": "<= 0.5", "sse": "<= 2"}
"""Next to a server that only writes: on grpc.aio, or straight to the sockets."""


@dataclass(frozen=True)
class Scale:
    """How much to measure."""

    stream_tokens: tuple[int, int]
    num_requests: int
    num_short: int
    num_long: int


FULL = Scale(stream_tokens=(20, 400), num_requests=512, num_short=4000, num_long=60)
QUICK = Scale(stream_tokens=(5, 55), num_requests=64, num_short=300, num_long=8)


@dataclass(frozen=True)
class Load:
    """What a client process reported, and the CPU that the router spent meanwhile."""

    num_requests: int
    num_tokens: int
    seconds: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_s: float

    @property
    def cpu_us_per_request(self) -> float:
        return self.cpu_s / self.num_requests * 1e6


def load(router: Measured, kind: str, **options: float) -> Load:
    """Runs clients of one kind (bench/stream_clients.py) against `router`."""
    argv = [sys.executable, "-m", "bench.stream_clients", kind]
    argv += [router.grpc if kind == "grpc" else router.http, "--model", router.model]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    before_s = router.cpu_s()
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    said = json.loads(output)
    return Load(
        num_requests=said["requests"],
        num_tokens=said["tokens"],
        seconds=said["seconds"],
        ttft_p50_ms=said["ttft_p50_ms"],
        ttft_p99_ms=said["ttft_p99_ms"],
        cpu_s=router.cpu_s() - before_s,
    )


class RouterBench:
    """The measurements of one run."""

    def __init__(self, reporter: Reporter, router: Measured, scale: Scale) -> None:
        self._reporter = reporter
        self._router = router
        self._scale = scale

    def streams(self, kind: str) -> None:
        """CPU per token, and that of a server that only writes the same."""
        per_token_us, tokens_per_s = self._per_token(kind, self._router)
        with bare_server(kind, STEP_MS) as bare:
            bare_us, _ = self._per_token(kind, bare)
        self._reporter.row(
            what="streams",
            kind=kind,
            tokens_per_s=tokens_per_s,
            cpu_us_per_token=per_token_us,
            tokens_per_core_s=1e6 / per_token_us,
            bare_server_us_per_token=bare_us,
            ratio_to_bare_server=per_token_us / bare_us,
        )
        self._reporter.check(
            f"CPU per token, {NUM_STREAMS} {kind} streams",
            per_token_us,
            "us",
            GOAL_PER_TOKEN_US[kind],
        )
        self._reporter.check(
            f"the same next to a bare server, {kind}",
            per_token_us / bare_us,
            "times",
            GOAL_OF_BARE[kind],
        )

    def _per_token(self, kind: str, server: Measured) -> tuple[float, float]:
        """CPU per token in microseconds, and tokens a second."""
        short, long = (
            load(server, kind, requests=NUM_STREAMS, concurrency=NUM_STREAMS, tokens=n)
            for n in self._scale.stream_tokens
        )
        num_tokens = long.num_tokens - short.num_tokens
        return (long.cpu_s - short.cpu_s) / num_tokens * 1e6, long.num_tokens / long.seconds

    def requests(self, kind: str, router: Measured, name: str) -> float:
        """CPU of whole requests of 64 tokens, in microseconds."""
        result = self._whole_requests(kind, router)
        with bare_server(kind, STEP_MS) as bare:
            bare_us = self._whole_requests(kind, bare).cpu_us_per_request
        self._reporter.row(
            what="requests of 64 tokens",
            kind=kind,
            router=name,
            cpu_us_per_request=result.cpu_us_per_request,
            bare_server_us_per_request=bare_us,
            ratio_to_bare_server=result.cpu_us_per_request / bare_us,
            ttft_p50_ms=result.ttft_p50_ms,
        )
        return result.cpu_us_per_request

    def _whole_requests(self, kind: str, server: Measured) -> Load:
        return load(server, kind, requests=self._scale.num_requests, concurrency=64, tokens=64)

    def rate(self, kind: str) -> None:
        """Saturation with answers of one token, and TTFT while the router is half busy."""
        number = self._scale.num_short
        full = load(self._router, kind, requests=number, concurrency=64, tokens=1)
        rate = full.num_requests / full.seconds
        alone = load(self._router, kind, requests=number // 8, rate=rate / 8, tokens=1)
        half_rate = _BUSY_SHARE / alone.cpu_us_per_request * 1e6
        paced = {"requests": number // 2, "rate": half_rate, "tokens": 1}
        half = load(self._router, kind, **paced)
        with bare_server(kind, STEP_MS) as bare:
            load(bare, kind, requests=20, tokens=1)
            beside = load(bare, kind, **paced)
        self._reporter.row(
            what="answers of one token",
            kind=kind,
            requests_per_s=rate,
            cpu_us_per_request=full.cpu_us_per_request,
            cpu_us_of_one_alone=alone.cpu_us_per_request,
            requests_per_s_half_busy=half.num_requests / half.seconds,
            busy_share=half.cpu_s / half.seconds,
            ttft_p50_ms=half.ttft_p50_ms,
            ttft_p99_ms=half.ttft_p99_ms,
            bare_ttft_p50_ms=beside.ttft_p50_ms,
            bare_ttft_p99_ms=beside.ttft_p99_ms,
        )
        for name, value, goal in (
            ("p50", half.ttft_p50_ms - beside.ttft_p50_ms, "<= 2.5"),
            ("p99", half.ttft_p99_ms - beside.ttft_p99_ms, "<= 10"),
        ):
            self._reporter.check(f"added TTFT {name}, half busy, {kind}", value, "ms", goal)

    def long_prompt(self, words: int) -> None:
        """What a prompt of 8,000 tokens adds to TTFT."""
        number = self._scale.num_long
        short = load(self._router, "grpc", requests=number, rate=10, tokens=1)
        long = load(self._router, "grpc", requests=number, rate=10, tokens=1, words=words)
        added_ms = long.ttft_p50_ms - short.ttft_p50_ms
        self._reporter.row(
            what=f"prompt of {LONG_PROMPT_TOKENS} tokens",
            kind="grpc",
            ttft_p50_ms=long.ttft_p50_ms,
            cpu_us_per_request=long.cpu_us_per_request,
        )
        self._reporter.check(f"TTFT added by {LONG_PROMPT_TOKENS} tokens", added_ms, "ms", "<= 8")


def _long_prompt_words(model: Path) -> int:
    """How many of the clients' words make 8,000 tokens."""
    num_tokens = len(Tokenizer(ModelFolder.load(model)).encode(" ".join(WORDS * 50)))
    return round(LONG_PROMPT_TOKENS * 50 * len(WORDS) / num_tokens)


def run(reporter: Reporter, scale: Scale, with_peer: bool) -> None:
    model = fetch(default_folder())
    num_words = _long_prompt_words(model)
    with baton_router(model, STEP_MS) as router:
        bench = RouterBench(reporter, router, scale)
        load(router, "grpc", requests=20, tokens=4)
        load(router, "sse", requests=20, tokens=4)
        for kind in ("grpc", "sse"):
            bench.streams(kind)
        own = {kind: bench.requests(kind, router, "baton") for kind in ("grpc", "sse")}
        if with_peer:
            with peer_router(peer_python(), STEP_MS) as peer:
                load(peer, "sse", requests=20, tokens=4)
                theirs = bench.requests("sse", peer, PEER)
            for kind, cpu_us in own.items():
                ratio = cpu_us / theirs
                reporter.check(f"CPU of a request, {kind}", ratio, f"of {PEER}'s", "<= 1.5")
        for kind in ("grpc", "sse"):
            bench.rate(kind)
        bench.long_prompt(num_words)
    stall_s = longest_callback_s(model, num_words, scale.num_long)
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
