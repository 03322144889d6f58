"""Serves a load and measures what clients get: TTFT, ITL, TPOT, throughput, goodput.

The load is open: requests come at random (Poisson) at `--rate` a second and never wait for the
answers of others, and TTFT counts from when a request was due. What comes in `--warm-up`
seconds is sent and not counted. Prompts are random tokens with nothing in common, unless
`--shared-prefix` says otherwise. It goes to a stack of Baton that is started for it, one prefill
and one decode worker with half of the cores each, or with `--url` to any OpenAI-compatible
server, or with `--grpc` to a router of Baton.

goodput_per_s counts the requests that were served within `--slo-ttft-ms` and `--slo-tpot-ms`,
sent_late how late the client itself was. Over HTTP an output is an event with text; a stack of
its own and `--grpc` tell every token.

With `--peer vllm` it instead compares Baton with vLLM on the same cores (bench/serve_peer.py):

    python -m bench.serve --peer vllm --peer-python V/bin/python --case pair --case interference
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from baton.v1 import inference_pb2
from bench.report import Reporter, argument_parser
from bench.routing_trace import read_trace
from bench.serve_clients import Client, GrpcClient, HttpClient, LoadRun
from bench.serve_figures import Slo, Window, figures
from bench.serve_load import (
    DrawSizes,
    Lengths,
    Prompts,
    make_load,
    poisson,
    sizes_between,
    sizes_of_trace,
)
from bench.serve_model import model_of_words
from bench.serve_peer import CASES, compare
from bench.serve_stacks import Endpoint, baton, disaggregated, own_cores
from client import BatonClient
from core.errors import BatonError

_PROGRESS_S = 5.0


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    reporter = Reporter("serve", arguments.json)
    if arguments.peer is not None:
        compare(reporter, arguments)
        return reporter.finish()
    try:
        with _target(arguments) as endpoint:
            uvloop.run(_open_loop(reporter, endpoint, arguments))
    except (BatonError, OSError, ValueError) as error:
        parser.error(str(error))
    return reporter.finish()


def make_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    target = parser.add_argument_group("what is measured (default: a stack of its own)")
    where = target.add_mutually_exclusive_group()
    where.add_argument("--url", help="OpenAI-compatible server: http://HOST:PORT/v1")
    where.add_argument("--grpc", metavar="HOST:PORT", help="router of Baton")
    where.add_argument("--peer", choices=["vllm"], help="compare Baton with it")
    target.add_argument(
        "--model", help="folder for a stack of its own [a random one]; for --url: its name there"
    )
    target.add_argument("--prefill", type=int, default=1, help="workers of its own stack [1]")
    target.add_argument("--decode", type=int, default=1, help="workers of its own stack [1]")
    for name in ("worker", "router"):
        target.add_argument(
            f"--{name}-args", type=shlex.split, default=[], help="more flags for its own stack"
        )
    target.add_argument("--api-key-env", metavar="NAME", help="variable with the key for --url")
    target.add_argument(
        "--respect-eos",
        action="store_true",
        help="with --url: answers may end early; by default they are asked not to (ignore_eos)",
    )
    target.add_argument(
        "--vocab-size", metavar="N", type=int, default=32_000, help="for --url [32000]"
    )
    target.add_argument(
        "--max-model-len", metavar="N", type=int, default=8192, help="for --url [8192]"
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--rate", type=positive_number, default=1.0, help="requests a second [1]")
    load.add_argument("--seconds", type=positive_number, default=30.0, help="that count [30]")
    load.add_argument("--warm-up", type=float, default=5.0, help="seconds before them [5]")
    load.add_argument("--seed", type=int, default=0, help="of times, lengths and prompts [0]")
    load.add_argument(
        "--prompt", type=Lengths.parse, default=Lengths(512, 512), help="tokens: N or N-M [512]"
    )
    load.add_argument(
        "--output", type=Lengths.parse, default=Lengths(64, 64), help="tokens: N or N-M [64]"
    )
    load.add_argument("--trace", type=Path, help="take both lengths from the requests of this file")
    load.add_argument("--shared-prefix", type=int, default=0, help="tokens all prompts share [0]")
    load.add_argument("--timeout-s", type=float, default=120.0, help="of a request [120]")
    load.add_argument("--slo-ttft-ms", type=float, help="a good answer begins within it")
    load.add_argument("--slo-tpot-ms", type=float, help="and has this time per token at most")
    peer = parser.add_argument_group("with --peer")
    peer.add_argument("--peer-python", type=Path, help="Python of the peer's environment")
    peer.add_argument(
        "--case", action="append", choices=list(CASES), help="what is compared [everything]"
    )
    peer.add_argument("--rounds", type=int, default=3, help="turns that each server gets [3]")
    peer.add_argument("--long-period-s", type=float, default=2.0, help="between long prompts [2]")
    peer.add_argument(
        "--chunk", type=int, action="append", help="colocated: tokens of a step [512, 1024, 2048]"
    )
    return parser


def positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


@contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    """What the load goes to."""
    if arguments.url is not None:
        yield Endpoint(
            name=arguments.url,
            model=arguments.model or "",
            vocab_size=arguments.vocab_size,
            max_model_len=arguments.max_model_len,
            url=arguments.url,
        )
    elif arguments.grpc is not None:
        with BatonClient(arguments.grpc) as client:
            yield _described(arguments.grpc, client.model())
    else:
        topology = disaggregated(arguments.prefill, arguments.decode, own_cores())
        topology = replace(
            topology,
            worker_args=tuple(arguments.worker_args),
            router_args=tuple(arguments.router_args),
        )
        _say(f"starting {topology.name}")
        model = model_of_words() if arguments.model is None else Path(arguments.model)
        with baton(topology, model) as endpoint:
            yield endpoint


def _described(address: str, info: inference_pb2.ModelInfo) -> Endpoint:
    return Endpoint(
        name=address,
        model=info.name,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        grpc=address,
    )


async def _open_loop(reporter: Reporter, endpoint: Endpoint, arguments: argparse.Namespace) -> None:
    """Sends the load and reports one row."""
    draw = random.Random(arguments.seed)
    window = Window(arguments.warm_up, arguments.warm_up + arguments.seconds)
    times = poisson(arguments.rate, window.end_s, draw)
    prompts = Prompts(endpoint.vocab_size, draw, arguments.shared_prefix)
    load = make_load(times, _sizes(arguments, endpoint), prompts, draw)
    client = _client(endpoint, arguments)
    async with LoadRun(client, load, arguments.timeout_s) as run:
        while not all(task.done() for task in run.tasks):
            await asyncio.wait(run.tasks, timeout=_PROGRESS_S)
            _say_progress(run)
    await client.close()
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    reporter.row(target=endpoint.name, **figures(run.records, window, slo))


def _sizes(arguments: argparse.Namespace, endpoint: Endpoint) -> DrawSizes:
    if arguments.trace is None:
        return sizes_between(arguments.prompt, arguments.output)
    return sizes_of_trace(read_trace(arguments.trace), endpoint.max_model_len)


def _client(endpoint: Endpoint, arguments: argparse.Namespace) -> Client:
    if endpoint.grpc:
        return GrpcClient(endpoint.grpc)
    key = os.environ.get(arguments.api_key_env, "") if arguments.api_key_env else ""
    options = {"temperature": 0} | ({} if arguments.respect_eos else {"ignore_eos": True})
    return HttpClient(endpoint.url, endpoint.model, key, options)


def _say_progress(run: LoadRun) -> None:
    sent = sum(planned.due_s <= run.now_s for planned in run.records)
    done = sum(task.done() for task in run.tasks)
    failed = sum(record.error is not None for record in run.records)
    _say(f"{run.now_s:.0f} s: {sent} of {len(run.tasks)} sent, {done} ended, {failed} failed")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
