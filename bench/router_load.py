"""Clients against one of the servers that `bench.router` compares, and what they cost it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.router_stacks import Measured


@dataclass(frozen=True)
class Load:
    """What a client process reported, and the CPU that the server spent meanwhile."""

    num_requests: int
    num_tokens: int
    seconds: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_s: float

    @property
    def cpu_us_per_request(self) -> float:
        return self.cpu_s / self.num_requests * 1e6

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def load(server: Measured, kind: str, **options: float) -> Load:
    """Runs clients of one kind (bench/stream_clients.py, whose flags are `options`)."""
    argv = [sys.executable, "-m", "bench.stream_clients", kind]
    argv += [server.grpc if kind == "grpc" else server.http, "--model", server.model]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    before_s = server.cpu_s()
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    cpu_s = server.cpu_s() - before_s
    said = json.loads(output)
    return Load(
        num_requests=said["requests"],
        num_tokens=said["tokens"],
        seconds=said["seconds"],
        ttft_p50_ms=said["ttft_p50_ms"],
        ttft_p99_ms=said["ttft_p99_ms"],
        cpu_s=cpu_s,
    )


@dataclass(frozen=True)
class TokenLoads:
    """Two loads that differ in the length of answers alone: their difference is tokens."""

    short: Load
    long: Load

    @property
    def us_per_token(self) -> float:
        """CPU of a token."""
        return self._per_token(self.long.cpu_s - self.short.cpu_s)

    def _per_token(self, cpu_s: float) -> float:
        return cpu_s / (self.long.num_tokens - self.short.num_tokens) * 1e6

    @classmethod
    def least_us(cls, rounds: Sequence[TokenLoads]) -> float:
        """CPU of a token where the machine was least busy with others, which only ever adds.

        The least of each length: the least of the differences would be one whose short load was
        disturbed.
        """
        long_s = min(each.long.cpu_s for each in rounds)
        return rounds[0]._per_token(long_s - min(each.short.cpu_s for each in rounds))


def token_loads(
    server: Measured, kind: str, num_streams: int, lengths: tuple[int, int]
) -> TokenLoads:
    """Both, each of so many streams at a time."""
    return TokenLoads(
        *(
            load(server, kind, requests=num_streams, concurrency=num_streams, tokens=length)
            for length in lengths
        )
    )
