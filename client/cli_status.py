"""`baton status`: the workers that a router knows, and the audit of their blocks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from client._arguments import Subcommands, add_server, api_key, seconds
from client._sync import BatonClient

_BLOCK_STATES = ("total", "free", "cached", "referenced", "quarantined")
_DEFAULT_WATCH_S = 2.0
_WIDE = 110


def add_command(commands: Subcommands) -> None:
    """Adds `status` to the command line."""
    parser = commands.add_parser(
        "status",
        help="show the workers and their KV blocks",
        description="Shows every worker that the router knows.",
    )
    add_server(parser)
    parser.add_argument(
        "--watch",
        metavar="S",
        nargs="?",
        type=seconds,
        const=_DEFAULT_WATCH_S,
        help=f"refresh every S seconds [{_DEFAULT_WATCH_S:.0f}] until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="check every block of every worker; exit with 1 if a check fails or a worker "
        "cannot be reached",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the status once or, with `--watch`, until interrupted."""
    with BatonClient(args.server, api_key()) as client:
        status = client.status(audit=args.audit)
        if args.watch is None:
            _print(status, args.json)
            return _audit_code(status) if args.audit else 0
        if args.json:
            while True:
                _print(status, as_json_lines=True)
                time.sleep(args.watch)
                status = client.status(audit=args.audit)
        with Live(auto_refresh=False) as live:
            while True:
                live.update(_view(status, live.console.width), refresh=True)
                time.sleep(args.watch)
                status = client.status(audit=args.audit)


def _print(status: inference_pb2.GetStatusResponse, as_json_lines: bool) -> None:
    if as_json_lines:
        print(json.dumps(as_json(status)), flush=True)
    else:
        console = Console()
        console.print(_view(status, console.width))


def as_json(status: inference_pb2.GetStatusResponse) -> dict[str, Any]:
    """What `--json` prints; `audit` only where it was asked for."""
    router = status.router
    return {
        "workers": [_worker(worker) for worker in status.workers],
        "router": {
            "model": router.model,
            "pid": router.pid,
            "num_requests": router.num_requests,
            "redis_ok": router.redis_ok,
        },
    }


def _worker(worker: worker_pb2.WorkerStatus) -> dict[str, Any]:
    load = worker.load
    entry: dict[str, Any] = {
        "id": worker.id,
        "role": _role(worker),
        "address": worker.address,
        "pid": worker.pid,
        "epoch": worker.epoch,
        "state": _state(worker),
        "kv_transport": worker.kv_transport,
        "queue_depth": load.queue_depth,
        "queued_tokens": load.queued_tokens,
        "running": load.running,
        "blocks": {name: getattr(load.blocks, name) for name in _BLOCK_STATES},
        "exports": load.exports,
        "imports": load.imports,
    }
    if worker.HasField("audit"):
        entry["audit"] = {"ok": worker.audit.ok, "errors": list(worker.audit.errors)}
    return entry


def _role(worker: worker_pb2.WorkerStatus) -> str:
    return types_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()


def _state(worker: worker_pb2.WorkerStatus) -> str:
    return types_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


def audit_failures(status: inference_pb2.GetStatusResponse) -> list[str]:
    """One line for each thing that an audit found; empty when every worker is in order."""
    failures = []
    for worker in status.workers:
        if worker.state == types_pb2.WORKER_STATE_UNREACHABLE:
            failures.append(f"{worker.id}: cannot be reached")
        elif not worker.HasField("audit"):
            failures.append(f"{worker.id}: did not answer the audit")
        elif not worker.audit.ok:
            failures += [f"{worker.id}: {line}" for line in worker.audit.errors or ("failed",)]
    if not status.workers:
        failures.append("the router knows no worker")
    return failures


def _audit_code(status: inference_pb2.GetStatusResponse) -> int:
    failures = audit_failures(status)
    for line in failures:
        sys.stderr.write(f"audit: {line}\n")
    return 1 if failures else 0


def _view(status: inference_pb2.GetStatusResponse, width: int) -> Group:
    """The table; pid, address and transport only where `width` columns have room for them."""
    router = status.router
    redis = "ok" if router.redis_ok else "away"
    head = f"model {router.model}  requests {router.num_requests}  redis {redis}"
    is_wide = width >= _WIDE
    has_audit = any(worker.HasField("audit") for worker in status.workers)
    table = Table(box=None, padding=(0, 1, 0, 0))
    wide_columns = ("pid", "address", "transport") if is_wide else ()
    for name in ("worker", "role", "state", *wide_columns):
        table.add_column(name, no_wrap=True)
    for name in ("queue", "run", "blocks", "free", "cached", "ref", "quar", "exp", "imp"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_audit:
        table.add_column("audit")
    for worker in status.workers:
        load = worker.load
        numbers = [load.queue_depth, load.running]
        numbers += [getattr(load.blocks, name) for name in _BLOCK_STATES]
        numbers += [load.exports, load.imports]
        cells = [worker.id, _role(worker), _state(worker)]
        cells += [str(worker.pid), worker.address, worker.kv_transport] if is_wide else []
        cells += map(str, numbers)
        if has_audit:
            cells.append("ok" if worker.audit.ok else "FAILED")
        table.add_row(*cells)
    return Group(head, table)
