"""`baton up`: a whole stack on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from client._arguments import Subcommands, port_number, positive_int
from client._async import AsyncBatonClient
from client.launch_plan import LaunchPlan, UpConfig, make_plan
from client.launcher import ReadyStack, Stack
from client.model_source import find_model
from core.errors import InvalidArgument, StartupError, Unavailable
from core.redis_client import connect_redis, redacted, redis_errors

# Passed on to every worker as they are.
_WORKER_FLAGS = (
    (
        "--dtype",
        "D",
        "float32, bfloat16, float16 or auto: of weights and KV [auto: the checkpoint's]",
    ),
    ("--device", "D", "cpu or cuda [cpu]"),
    ("--block-size", "N", "tokens in a KV block"),
    ("--num-gpu-blocks-override", "N", "KV blocks of a worker"),
    ("--kv-cache-memory-bytes", "N", "memory for the KV blocks of a worker"),
    ("--max-model-len", "N", "longest sequence in tokens [the model's context]"),
    ("--max-num-seqs", "N", "sequences in one step"),
    ("--max-num-batched-tokens", "N", "tokens in one step"),
)
_ANSWER_TOKENS = 128
_REDIS_TIMEOUT_S = 5.0


def add_command(commands: Subcommands) -> None:
    """Adds `up` to the command line."""
    parser = commands.add_parser(
        "up",
        help="run a whole stack on this machine",
        description="Starts Redis, prefill and decode workers and a router, prints one line "
        "`ready grpc=HOST:PORT http=HOST:PORT prefill=N decode=M model=NAME` (http only with "
        "--http-port) and serves until Ctrl-C, which stops everything. Without --model it "
        "serves SmolLM2-135M-Instruct, fetched once.",
    )
    parser.add_argument("--model", metavar="M", help="model folder or hub name")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", metavar="N", type=positive_int, default=1, help=f"{role} workers [1]"
        )
    parser.add_argument("--host", default="127.0.0.1", help="router's address [127.0.0.1]")
    parser.add_argument(
        "--port",
        metavar="P",
        type=port_number,
        default=50051,
        help="router's port; 0: a free one [50051]",
    )
    parser.add_argument(
        "--http-port",
        metavar="P",
        type=port_number,
        help="serve the OpenAI HTTP API on this port, too; 0: a free one",
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        help="file of API keys, lines of KEY or KEY TENANT [none: everybody may call]",
    )
    parser.add_argument("--redis", metavar="URL", help="use this Redis instead of an own one")
    parser.add_argument(
        "--kv-transport",
        choices=["auto", "nixl", "ucxx", "tcp"],
        default="auto",
        help="how KV moves [auto: the first of the others that is installed]",
    )
    parser.add_argument(
        "--threads-per-worker",
        metavar="T",
        type=positive_int,
        help="CPU threads of each worker [cores / workers]",
    )
    workers = parser.add_argument_group("passed on to every worker")
    for flag, metavar, text in _WORKER_FLAGS:
        workers.add_argument(flag, metavar=metavar, help=text)
    for role in ("prefill", "decode", "router"):
        parser.add_argument(
            f"--{role}-args",
            metavar="ARGS",
            type=shlex.split,
            default=[],
            help=f"more flags, for {role} only: --{role}-args='--FLAG VALUE'",
        )
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="of all services [INFO]",
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", help="where each process writes NAME.log [a temporary folder]"
    )
    parser.add_argument("--ask", metavar="QUESTION", help="ask this once ready, print the answer")
    parser.add_argument("--once", action="store_true", help="with --ask: stop after the answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the stack; 0 when it was stopped, 130 when it was interrupted before it was ready."""
    if args.once and args.ask is None:
        raise InvalidArgument("--once needs --ask")
    return asyncio.run(_up(args))


async def _up(args: argparse.Namespace) -> int:
    _cancel_on_signals()
    try:
        if args.redis is not None:
            await _require_redis(args.redis)
        model = await find_model(args.model, _say)
        with _log_dir(args.log_dir) as log_dir:
            plan = make_plan(_config(args, str(model.path), model.name), log_dir)
            return await serve(plan, log_dir, question=args.ask, once=args.once)
    except asyncio.CancelledError:
        return 130


async def _require_redis(url: str) -> None:
    """Running stacks do without their Redis for a while, but workers find each other there."""
    redis = connect_redis(url, timeout_s=_REDIS_TIMEOUT_S)
    try:
        with redis_errors():
            await redis.ping()
    except Unavailable as error:
        raise StartupError(f"{redacted(url)} cannot be reached: {error.message}") from error
    finally:
        await redis.aclose()


async def serve(
    plan: LaunchPlan, log_dir: Path, *, question: str | None = None, once: bool = False
) -> int:
    """Runs the processes of `plan` until the task is cancelled or the router ends.

    Cancelled before the stack is ready, it stops everything and raises CancelledError.
    """
    stack = Stack(plan, log_dir, _say)
    try:
        ready = await stack.start()
        try:
            return await _serve_ready(stack, plan, ready, question, once)
        except asyncio.CancelledError:
            return 0  # Ctrl-C is how serving ends
    finally:
        await stack.stop()


async def _serve_ready(
    stack: Stack, plan: LaunchPlan, ready: ReadyStack, question: str | None, once: bool
) -> int:
    http = f"http={ready.http} " if ready.http else ""
    print(
        f"ready grpc={ready.address} {http}prefill={len(plan.prefill_ids)} "
        f"decode={len(plan.decode_ids)} model={ready.model}",
        flush=True,
    )
    if question is not None:
        await _ask(AsyncBatonClient(ready.address, plan.api_key), question)
        if once:
            return 0
    _say(f"gRPC (baton.v1.Inference) listens on {ready.address}. Ask from another terminal:")
    _say(f"  {_own_command()} generate --server {ready.address} --chat --prompt 'Who are you?'")
    if ready.http:
        _say(f"The OpenAI API is at http://{ready.http}/v1.")
    _say("Ctrl-C stops everything.")
    raise StartupError(await stack.until_router_ends())


async def _ask(baton: AsyncBatonClient, question: str) -> None:
    """Prints the model's answer as it comes; a model without a chat template continues it."""
    print(f"> {question}", flush=True)
    async with baton as client:
        max_tokens = min(_ANSWER_TOKENS, (await client.model()).max_model_len // 2)
        message = {"role": "user", "content": question}
        stream = client.stream(messages=[message], max_tokens=max_tokens)
        try:
            first = await anext(stream)
        except InvalidArgument:
            stream = client.stream(question, max_tokens=max_tokens)
            first = await anext(stream)
        print(first.text, end="", flush=True)
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
        print(flush=True)
        await stream.completion()


def _config(args: argparse.Namespace, model: str, model_name: str | None) -> UpConfig:
    worker_args: list[str] = []
    for flag, *_ in _WORKER_FLAGS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            worker_args += [flag, value]
    return UpConfig(
        model=model,
        num_prefill=args.prefill,
        num_decode=args.decode,
        host=args.host,
        port=args.port,
        http_port=args.http_port,
        api_keys=args.api_keys and Path(args.api_keys).resolve(),
        served_model_name=args.served_model_name or model_name,
        redis_url=args.redis,
        kv_transport=args.kv_transport,
        threads_per_worker=args.threads_per_worker,
        worker_args=tuple(worker_args),
        prefill_args=tuple(args.prefill_args),
        decode_args=tuple(args.decode_args),
        router_args=tuple(args.router_args),
        log_level=args.log_level,
    )


@contextlib.contextmanager
def _log_dir(chosen: str | None) -> Iterator[Path]:
    """The folder of the logs. A temporary one stays only if the error sends the reader there."""
    if chosen is not None:
        path = Path(chosen).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"cannot create {path}: {error.strerror}") from error
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="baton-"))
    is_needed = False
    try:
        yield path
    except StartupError as error:
        is_needed = str(path) in error.message
        raise
    finally:
        if not is_needed:
            shutil.rmtree(path, ignore_errors=True)


def _cancel_on_signals() -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _own_command() -> str:
    return shlex.quote(sys.argv[0]) if sys.argv[0].endswith("baton") else "baton"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
