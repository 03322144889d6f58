"""Baton beside vLLM on the same cores, measured by the same clients over HTTP.

Both serve the random Llama of 246 million parameters in bfloat16. All take turns, several each;
a figure is the median of its turns, a ratio the median of the ratios within one round of turns.

*pair*: 1P1D each, half of the cores for prefill and half for decode; prompts of 512 tokens, one
after the other.

*interference*: 8 streams decode while prompts of 2,000 tokens come, one every `--long-period-s`:
two seconds, or as long as one of the machine's cores takes for one. Baton 1P1D against one server
on all cores, vLLM's and Baton's own, that computes a chunk of the prompt in each step beside the
streams. A chunk has 512, 1,024 or 2,048 tokens; what counts is the one with which the server does
best.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench.cpu_meter import CpuMeter
from bench.report import Reporter, quantile
from bench.serve_clients import HttpClient, LoadRun
from bench.serve_figures import Record
from bench.serve_load import Planned, Prompts
from bench.serve_model import model_of_words
from bench.serve_stacks import Endpoint, baton, colocated, disaggregated, own_cores
from bench.serve_vllm import INSTALL, Peer, PeerServers, is_installed, peer_alone, peer_pair

CHUNKS = (512, 1024, 2048)
MAX_MODEL_LEN = 4096
_OPTIONS = {"temperature": 0, "ignore_eos": True}
_TIMEOUT_S = 120.0
_REST_S = 0.5
"""After a load: what was taken back ends."""

PAIR_PROMPT, PAIR_OUTPUTS = 512, 64
_PAIR_REQUESTS = 5

NUM_STREAMS, _STREAM_PROMPT, _STREAM_OUTPUTS = 8, 64, 3000
LONG_PROMPT, _LONG_OUTPUTS = 2000, 8
_LONG_FOR_S = 16.0
"""So long long prompts come."""
_STREAMS_AHEAD_S = 5.0
"""The streams begin before the first long prompt by so much."""

BATON, COLOCATED, VLLM = "baton 1P1D", "baton colocated", "vllm"

Figures = Mapping[str, float]
"""What one turn has shown: latencies, and the cores that it and everybody else kept busy."""


@dataclass
class Subject:
    """A server under test, and its figures, a turn each. `servers` rest between its turns."""

    name: str
    endpoint: Endpoint
    servers: PeerServers | None = None
    turns: list[Figures] = field(default_factory=list)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """It may run."""
        if self.servers is not None:
            self.servers.release()
        try:
            yield
        finally:
            if self.servers is not None:
                self.servers.hold()

    def median(self, figure: str) -> float:
        return median(turn[figure] for turn in self.turns)

    def ratio(self, figure: str, other: Subject) -> float:
        """This one's to the other's."""
        pairs = zip(self.turns, other.turns, strict=True)
        return median(own[figure] / others[figure] for own, others in pairs)


def compare(reporter: Reporter, arguments: argparse.Namespace) -> None:
    """Runs the cases that are asked for. Without the peer it says how to install it.

    Raises SystemExit on a machine with one core, which prefill and decode cannot share fairly.
    """
    python: Path | None = arguments.peer_python
    if python is None or not is_installed(python):
        print(f"skipped: vLLM is not installed in --peer-python: {INSTALL}", file=sys.stderr)
        reporter.row(skipped="vllm is not installed")
        return
    if len(own_cores()) < 2:
        raise SystemExit("comparing needs at least two cores: one for prefill, one for decode")
    peer = Peer(python.absolute(), model_of_words(), MAX_MODEL_LEN)
    for name in arguments.case or CASES:
        CASES[name](reporter, peer, arguments)


def pair(reporter: Reporter, peer: Peer, arguments: argparse.Namespace) -> None:
    """1P1D against 1P1D."""
    with ExitStack() as stack:
        servers = stack.enter_context(peer_pair(peer, own_cores()))
        servers.hold()
        endpoint = stack.enter_context(baton(disaggregated(1, 1, own_cores()), peer.model))
        own, other = Subject(BATON, endpoint), Subject("vllm 1P1D", servers.endpoint, servers)
        _take_turns(reporter, "pair", [own, other], arguments.rounds, _pair_turn)
    for figure in ("ttft", "tpot"):
        name = f"{figure.upper()} of {BATON}, prompts of {PAIR_PROMPT}"
        reporter.check(name, own.ratio(f"{figure}_p50_ms", other), "of vllm 1P1D", "<= 0.6")


def interference(reporter: Reporter, peer: Peer, arguments: argparse.Namespace) -> None:
    """1P1D against colocated servers, chunk by chunk: so many stacks do not fit side by side."""
    found: list[dict[str, Subject]] = []
    for chunk in arguments.chunk or CHUNKS:
        with ExitStack() as stack:
            servers = stack.enter_context(peer_alone(peer, chunk, own_cores()))
            servers.hold()
            subjects = {VLLM: Subject(f"vllm {chunk}", servers.endpoint, servers)}
            for kind, topology in (
                (COLOCATED, colocated(chunk, own_cores())),
                (BATON, disaggregated(1, 1, own_cores())),
            ):
                endpoint = stack.enter_context(baton(topology, peer.model))
                subjects[kind] = Subject(topology.name, endpoint)
            turn = partial(_mixed_turn, period_s=arguments.long_period_s)
            case = f"interference {chunk}"
            _take_turns(reporter, case, list(subjects.values()), arguments.rounds, turn)
        found.append(subjects)
    for kind in (VLLM, COLOCATED):
        # Each block has a 1P1D of its own, measured in the same rounds.
        best = min(found, key=lambda subjects: subjects[kind].ratio("itl_p99_ms", subjects[BATON]))
        _check_interference(reporter, best[kind], best[BATON])


def _check_interference(reporter: Reporter, other: Subject, own: Subject) -> None:
    reporter.check(
        f"p99 ITL of {other.name} beside long prompts",
        other.ratio("itl_p99_ms", own),
        f"of {own.name}'s",
        ">= 5",
    )
    reporter.check(
        f"TTFT of long prompts, {own.name}",
        own.ratio("ttft_p50_ms", other),
        f"of {other.name}'s",
        "<= 2.5",
    )


CASES: dict[str, Callable[[Reporter, Peer, argparse.Namespace], None]] = {
    "pair": pair,
    "interference": interference,
}


def _take_turns(
    reporter: Reporter,
    case: str,
    subjects: Sequence[Subject],
    num_rounds: int,
    turn: Callable[[Endpoint, random.Random], Coroutine[Any, Any, Figures]],
) -> None:
    """Every round has another order."""
    draw = random.Random(0)
    for number in range(num_rounds):
        for subject in draw.sample(subjects, len(subjects)):
            with subject.turn():
                meter = CpuMeter.start()
                figures = {
                    **uvloop.run(turn(subject.endpoint, draw)),
                    "own_cores": meter.own_cores(),
                    "other_cores": meter.other_cores(),
                }
            shown = {name: round(value, 2) for name, value in figures.items()}
            print(f"{case}, round {number}, {subject.name}: {shown}", file=sys.stderr, flush=True)
            subject.turns.append(figures)
    for subject in subjects:
        medians = {name: subject.median(name) for name in subject.turns[0]}
        reporter.row(case=case, server=subject.name, **medians)


async def _pair_turn(endpoint: Endpoint, draw: random.Random) -> Figures:
    """One request after the other. The first wakes the servers up and does not count."""
    prompts = Prompts(endpoint.vocab_size, draw)
    records = []
    for _ in range(1 + _PAIR_REQUESTS):
        load = [Planned(0.0, prompts.draw(PAIR_PROMPT), PAIR_OUTPUTS)]
        records += await _served(endpoint, load, num_awaited=1)
    return {
        "ttft_p50_ms": median(record.ttft_s for record in records[1:]) * 1e3,
        "tpot_p50_ms": median(record.tpot_s or 0.0 for record in records[1:]) * 1e3,
    }


async def _mixed_turn(endpoint: Endpoint, draw: random.Random, period_s: float) -> Figures:
    """Streams, and long prompts between their tokens."""
    prompts = Prompts(endpoint.vocab_size, draw)
    num_long = math.ceil(_LONG_FOR_S / period_s)
    times = [_STREAMS_AHEAD_S + number * period_s for number in range(num_long)]
    load = [Planned(due_s, prompts.draw(LONG_PROMPT), _LONG_OUTPUTS) for due_s in times]
    load += [
        Planned(0.0, prompts.draw(_STREAM_PROMPT), _STREAM_OUTPUTS) for _ in range(NUM_STREAMS)
    ]
    records = await _served(endpoint, load, num_awaited=num_long)
    long, streams = records[:num_long], records[num_long:]
    end_s = times[-1] + period_s
    gaps = [gap for record in streams for gap in record.gaps_s(_STREAMS_AHEAD_S, end_s)]
    return {
        "itl_p50_ms": quantile(gaps, 0.5) * 1e3,
        "itl_p99_ms": quantile(gaps, 0.99) * 1e3,
        "itl_max_ms": max(gaps) * 1e3,
        "ttft_p50_ms": median(record.ttft_s for record in long) * 1e3,
    }


async def _served(endpoint: Endpoint, load: Sequence[Planned], num_awaited: int) -> list[Record]:
    """Returns when the first of `load` are served, and takes the others back. Raises
    RuntimeError when one failed."""
    client = HttpClient(endpoint.url, endpoint.model, options=_OPTIONS)
    async with LoadRun(client, load, _TIMEOUT_S) as run:
        await asyncio.wait(run.tasks[:num_awaited])
    await client.close()
    await asyncio.sleep(_REST_S)
    errors = {record.error for record in run.records if record.error is not None}
    if errors:
        raise RuntimeError(f"{endpoint.name}: {', '.join(sorted(errors))}")
    return run.records
