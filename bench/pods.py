"""A local stack whose processes can be killed, suspended and started again one by one.

`baton up` watches over its processes; here whoever measures or tests owns them. Every process
keeps its name and its port over restarts, as a pod with a stable address does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from redis import Redis

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from bench.ports import free_ports
from client import BatonClient
from client.launch_plan import UpConfig, make_plan, redis_process
from client.processes import ProcessSpec, dying_with_parent
from core.address import port_of
from core.errors import Unavailable

START_TIMEOUT_S = 120.0
_POLL_S = 0.02
_TAIL_BYTES = 4000


class Pod:
    """One process. Its output goes to `log_path`, over all its lives."""

    def __init__(self, spec: ProcessSpec, log_dir: Path) -> None:
        self.name = spec.name
        self.log_path = log_dir / f"{spec.name}.log"
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Of the latest life."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it is there, suspended or not."""
        return self._process is not None and self._process.poll() is None

    def start(self, *extra: str) -> None:
        """Starts it without waiting; `wait_ready` does. `extra` arguments, for this life only,
        override others."""
        assert not self.is_running, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                dying_with_parent((*self._spec.argv, *extra)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for whoever runs the stack.
                start_new_session=True,
                env={**os.environ, **self._spec.env},
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when it says that it is ready. Raises RuntimeError with its last words."""
        if self._spec.probe is not None:
            asyncio.run(asyncio.wait_for(self._spec.probe(), timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith("ready ") for line in self.log().splitlines()):
            if not self.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start: {self.log()[-_TAIL_BYTES:]}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Harmless when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def suspend(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """SIGCONT. Harmless when it is not suspended."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout_s)

    def log(self) -> str:
        """What its latest life has said."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


class RedisPod(Pod):
    """Keeps a snapshot on disk when asked to."""

    def __init__(self, spec: ProcessSpec, run_dir: Path, url: str) -> None:
        super().__init__(spec, run_dir)
        self._url = url
        self._snapshot = run_dir / "dump.rdb"

    def save_snapshot(self) -> None:
        """What it holds now is what its later lives begin with."""
        with contextlib.closing(Redis.from_url(self._url)) as client:
            client.save()

    def forget_snapshot(self) -> None:
        """Its later lives begin empty."""
        self._snapshot.unlink(missing_ok=True)


class PodStack:
    """Redis, a router and workers; `workers` by id: prefill-0, decode-0, …

    `adapt` may change how a worker is started.
    """

    def __init__(
        self,
        config: UpConfig,
        run_dir: Path,
        adapt: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec,
    ) -> None:
        ports = iter(free_ports(2 + config.num_prefill + config.num_decode))
        redis, self.redis_url = redis_process(run_dir, next(ports))
        self.address = f"127.0.0.1:{next(ports)}"
        port = port_of(self.address)
        plan = make_plan(replace(config, port=port, redis_url=self.redis_url), run_dir)
        self.redis = RedisPod(redis, run_dir, self.redis_url)
        self.router = Pod(plan.router, run_dir)
        self._router_spec, self._run_dir = plan.router, run_dir
        self._more_routers: list[Pod] = []
        self.workers = {
            spec.name: Pod(adapt(_as_worker(spec, next(ports))), run_dir) for spec in plan.others
        }

    @property
    def pods(self) -> list[Pod]:
        return [self.redis, self.router, *self._more_routers, *self.workers.values()]

    def start(self, unfit: Collection[str] = ()) -> None:
        """Starts everything; returns when the router can use every worker but the `unfit`."""
        for pod in self.pods:
            pod.start()
        for pod in self.pods:
            pod.wait_ready()
        self.wait_usable(*(self.workers.keys() - set(unfit)))

    def close(self) -> None:
        """Kills everything."""
        for pod in self.pods:
            pod.kill()

    def client(self) -> BatonClient:
        return BatonClient(self.address)

    def add_router(self) -> str:
        """Starts one more router over the same workers; its address when it serves."""
        (port,) = free_ports(1)
        name = f"router-{len(self._more_routers) + 1}"
        spec = _with_port(replace(self._router_spec, name=name), port)
        router = Pod(spec, self._run_dir)
        self._more_routers.append(router)
        router.start()
        router.wait_ready()
        return f"127.0.0.1:{port}"

    def restart_router(self, *extra: str) -> None:
        """Ends the router if it runs, and starts it with `extra` arguments; waits for all."""
        self.router.kill()
        self.router.start(*extra)
        self.router.wait_ready()
        self.wait_usable(*self.workers)

    def restart(self, *names: str) -> None:
        """Starts workers that are gone again; returns when the router uses their new lives."""
        for name in names:
            self.workers[name].start()
        self.wait_usable(*names)

    def wait_usable(self, *names: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the router holds these workers' present lives for ready."""
        wanted = {(name, self.workers[name].pid) for name in names}
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while True:
                with contextlib.suppress(Unavailable):
                    workers = client.status().workers
                    if wanted <= {(w.id, w.pid) for w in workers if _is_ready(w)}:
                        return
                for name in names:
                    pod = self.workers[name]
                    if not pod.is_running or time.monotonic() > deadline:
                        raise RuntimeError(f"{name} is not usable: {pod.log()[-_TAIL_BYTES:]}")
                time.sleep(_POLL_S)

    def wait_idle(self, timeout_s: float = 30.0) -> list[str]:
        """Waits until nothing is held for anybody; what still is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.client() as client:
            while True:
                try:
                    faults = idle_faults(client.status(audit=True), self.workers)
                except Unavailable as error:
                    faults = [error.message]
                if not faults or time.monotonic() > deadline:
                    return faults
                time.sleep(5 * _POLL_S)


def idle_faults(status: inference_pb2.GetStatusResponse, names: Iterable[str]) -> list[str]:
    """What keeps a stack with these workers from its idle level; empty when it is idle.

    Every worker is ready, every block free or cached, every queue empty, every audit clean.
    """
    faults = [f"router: {status.router.num_requests} requests"] * bool(status.router.num_requests)
    ready = {worker.id for worker in status.workers if _is_ready(worker)}
    faults += [f"{name}: not ready" for name in names if name not in ready]
    for worker in status.workers:
        load = worker.load
        held = {
            "queued": load.queue_depth,
            "queued tokens": load.queued_tokens,
            "running": load.running,
            "exports": load.exports,
            "imports": load.imports,
            "referenced": load.blocks.referenced,
            "quarantined": load.blocks.quarantined,
        }
        faults += [f"{worker.id}: {count} {name}" for name, count in held.items() if count]
        faults += [f"{worker.id}: {error}" for error in worker.audit.errors]
    return faults


def _is_ready(worker: worker_pb2.WorkerStatus) -> bool:
    return worker.state == types_pb2.WORKER_STATE_READY


@contextmanager
def pod_stack(
    config: UpConfig,
    run_dir: Path,
    adapt: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec,
) -> Iterator[PodStack]:
    """A started PodStack, killed at the end."""
    stack = PodStack(config, run_dir, adapt)
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


def _with_port(spec: ProcessSpec, port: int) -> ProcessSpec:
    return replace(spec, argv=(*spec.argv, "--port", str(port)))


def _as_worker(spec: ProcessSpec, port: int) -> ProcessSpec:
    # Redis is the stack's own, so ids need not be told from other stacks'.
    spec = replace(spec, argv=(*spec.argv, "--worker-id", spec.name))
    return _with_port(spec, port)
