"""Start and stop of a worker process, in the order in which it happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.v1 import types_pb2
from core.address import join_host_port, port_of
from core.http_server import HttpServer
from core.logs import configure, event
from core.model_folder import model_digest, resolve_model
from core.rpc import RpcServer, run_service, settle_heap, wait_for_stop_signal
from core.settings import load_settings
from core.tls import load_tls
from core.tracing import make_tracer
from engine.engine import Engine, load_engine
from engine.warm_up import warm_up
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.digests import BlockDigests, Ranges
from kvtransfer.peers import Identity
from kvtransfer.routes import ucx_log
from kvtransfer.select import make_transport
from worker.drain import drain
from worker.host import Parts, WorkerHost
from worker.metrics import metrics_app
from worker.prefix_reader import PrefixReader
from worker.prefix_warmer import PrefixWarmer
from worker.reach import reach_peers
from worker.role import RoleService
from worker.settings import WorkerSettings
from worker.worker_service import install

logger = logging.getLogger(__name__)

HASH_SEED = "baton-1"
"""Changes when the way of hashing blocks changes, so that versions do not mix."""
STOP_GRACE_S = 1.0

ServiceFactory = Callable[[WorkerHost], RoleService]


def run(prog: str, make_service: ServiceFactory) -> int:
    """Runs one worker until SIGINT or SIGTERM; the exit code."""
    settings = load_settings(WorkerSettings, f"python -m {prog}", sys.argv[1:])
    configure(settings.worker_id, settings.log_level)
    return run_service(lambda: _serve(settings, make_service, prog))


async def _serve(settings: WorkerSettings, make_service: ServiceFactory, prog: str) -> None:
    tls = load_tls(settings)
    tracer = make_tracer(settings, f"baton-{prog.removesuffix('_svc')}", settings.worker_id)
    log = contextlib.nullcontext() if settings.kv_require is None else ucx_log()
    with log as ucx, ThreadPoolExecutor(1, thread_name_prefix="device") as device:
        engine, digest = await asyncio.get_running_loop().run_in_executor(device, _load, settings)
        epoch = time.time_ns() // 1000
        region = _memory_region(settings, engine)
        host_name = settings.advertise_host or settings.host
        agent = f"{settings.worker_id}@{epoch}"
        transport = make_transport(settings.kv_transport, agent, region, host_name)
        fingerprint = _fingerprint(engine, digest, transport)
        identity = Identity(settings.worker_id, epoch, fingerprint)
        await transport.start()
        digests = BlockDigests(region, _device_ranges(engine))
        parts = Parts(engine, device, transport, digests, identity, tls, ucx, tracer)
        server = RpcServer(settings.host, settings.port, tls)
        host = WorkerHost(settings, parts, server.set_serving)
        install(host, make_service(host), server.grpc_server)
        metrics = _metrics_server(settings, host)
        try:
            metrics_address = await metrics.start() if metrics is not None else None
            address = await server.start(["baton.v1.Worker", *host.service.grpc_services])
            if not await _joins(host):
                return
            host.start(_advertised(settings, address))
            await server.set_serving(host.is_ready)
            settle_heap()
            shown = f" metrics={metrics_address}" if metrics_address else ""
            sys.stdout.write(f"ready grpc={address} worker_id={settings.worker_id}{shown}\n")
            sys.stdout.flush()
            await _wait_for_end(host, settings.drain_timeout_s)
        finally:
            await server.set_serving(False)
            await host.stop()
            await server.stop(STOP_GRACE_S)
            if metrics is not None:
                await metrics.stop()


def _metrics_server(settings: WorkerSettings, host: WorkerHost) -> HttpServer | None:
    if settings.metrics_port is None:
        return None
    return HttpServer(metrics_app(host.figures), settings.host, settings.metrics_port)


async def _joins(host: WorkerHost) -> bool:
    """Meets the others before it says that it is ready. False: it was told to stop meanwhile."""

    async def meet() -> None:
        await _warm_prefixes(host)
        await reach_peers(host, host.registry.list)

    meeting = asyncio.ensure_future(meet())
    stop = asyncio.ensure_future(wait_for_stop_signal())
    await asyncio.wait({meeting, stop}, return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        meeting.cancel()
        await asyncio.gather(meeting, return_exceptions=True)
        return False
    stop.cancel()
    meeting.result()
    return True


async def _warm_prefixes(host: WorkerHost) -> None:
    num_blocks = int(host.settings.warm_prefix_share * host.engine.pool.num_blocks)
    if num_blocks > 0:
        reader = PrefixReader(host, host.service.on_room)
        warmer = PrefixWarmer(host, reader, host.registry.list)
        await warmer.run(num_blocks, host.settings.warm_prefix_timeout_s)


async def _wait_for_end(host: WorkerHost, drain_timeout_s: float) -> None:
    """Until a signal, and then until nothing is left to do or a second one.

    Raises what ends a part without which the worker is of no use.
    """
    await _first_of(host, wait_for_stop_signal())
    await _first_of(host, wait_for_stop_signal(), drain(host, drain_timeout_s))


async def _first_of(host: WorkerHost, *coroutines: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    await asyncio.wait({*tasks, *host.vital}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for task in host.vital:
        if task.done():
            task.result()


def _load(settings: WorkerSettings) -> tuple[Engine, str]:
    """In the device thread: the engine, ready for its first request, and the model's digest."""
    path = resolve_model(settings.model)
    engine = load_engine(settings.engine_config(path), _log_progress)
    warm_up(engine, _log_progress)
    return engine, model_digest(path)


def _log_progress(message: str) -> None:
    event(logger, logging.INFO, "loading", step=message)


def _fingerprint(engine: Engine, digest: str, transport: Transport) -> types_pb2.Fingerprint:
    return types_pb2.Fingerprint(
        model=digest,
        dtype=_precision(engine),
        layout=engine.kv_cache.shape.layout_name,
        block_size=engine.pool.block_size,
        block_bytes=engine.kv_cache.block_bytes,
        hash_seed=HASH_SEED,
        kv_transport=transport.name,
    )


def _precision(engine: Engine) -> str:
    """KV that was computed with other weights must not be mixed."""
    quantization = engine.config.quantization
    return engine.dtype if quantization == "none" else f"{engine.dtype}, {quantization} weights"


def _device_ranges(engine: Engine) -> Ranges | None:
    """How a GPU computes digests; None on a CPU."""
    if not engine.kv_cache.data.is_cuda:
        return None
    from worker.device_digests import DeviceDigests  # Needs Triton, which a CPU does not.

    digests = DeviceDigests(engine.kv_cache.data)
    digests([0], engine.kv_cache.block_bytes)  # Compiles the kernel: no transfer waits for that.
    return digests


def _memory_region(settings: WorkerSettings, engine: Engine) -> MemoryRegion:
    return MemoryRegion(
        address=engine.kv_cache.data_ptr(),
        num_blocks=engine.pool.num_blocks,
        block_bytes=engine.kv_cache.block_bytes,
        memory="DRAM" if settings.device == "cpu" else "VRAM",
    )


def _advertised(settings: WorkerSettings, address: str) -> str:
    if not settings.advertise_host:
        return address
    return join_host_port(settings.advertise_host, port_of(address))
