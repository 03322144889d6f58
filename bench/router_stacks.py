"""The processes that `bench.router` measures: a router before mock workers, and a peer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.cpu_meter import cpu_s
from bench.pods import Pod
from bench.ports import free_ports
from client.launch_plan import redis_process
from client.processes import ProcessSpec

PEER = "sglang-router==0.3.2"
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Measured:
    """A router under test. `grpc` and `http` are what clients of each kind connect to."""

    pid: int
    http: str
    model: str
    grpc: str = ""

    def cpu_s(self) -> float:
        """CPU time so far, of all its threads."""
        return cpu_s(self.pid)


@contextmanager
def baton_router(model: Path, step_ms: float) -> Iterator[Measured]:
    """The product's router with Redis and the two mock workers."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(mock_workers(model, step_ms))
        flags = ("--model", str(model), "--redis-url", redis_url, "--log-level", "WARNING")
        ports = ("--port", "0", "--http-port", "0", "--served-model-name", "mock")
        router = _running(stack, _module("router", "router", *flags, *ports), run_dir)
        fields = ready_fields(router.log())
        yield Measured(
            pid=router.pid,
            grpc=fields["grpc"],
            http=f"http://{fields['http']}",
            model="mock",
        )


@contextmanager
def mock_workers(model: Path, step_ms: float) -> Iterator[str]:
    """A Redis and the two mock workers; yields the Redis' URL."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis, redis_url = redis_process(run_dir)
        _running(stack, redis, run_dir)
        flags = ("--model", str(model), "--redis-url", redis_url, "--step-ms", str(step_ms))
        _running(stack, _module("workers", "bench.mock_workers", *flags), run_dir)
        yield redis_url


@contextmanager
def peer_router(python: Path, step_ms: float) -> Iterator[Measured]:
    """The peer as a plain proxy before one OpenAI mock."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mock_port, port, metrics_port = free_ports(3)
        mock = _module(
            "mock", "bench.openai_mock", "--port", str(mock_port), "--step-ms", str(step_ms)
        )
        _running(stack, mock, run_dir)
        url = f"http://127.0.0.1:{port}"
        argv = [str(python), "-m", "sglang_router.launch_router", "--port", str(port)]
        argv += ["--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "warn"]
        argv += ["--prometheus-port", str(metrics_port)]
        argv += ["--worker-urls", f"http://127.0.0.1:{mock_port}"]
        peer = Pod(ProcessSpec("peer", tuple(argv)), run_dir)
        stack.callback(peer.kill)
        peer.start()
        wait_http(f"{url}/v1/models", peer)
        yield Measured(_last_child(psutil.Process(peer.pid)).pid, http=url, model="mock")


@contextmanager
def bare_server(kind: str, step_ms: float) -> Iterator[Measured]:
    """A server of streams that does nothing else (bench/bare_server.py)."""
    with ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = _module("bare", "bench.bare_server", kind, "--step-ms", str(step_ms))
        server = _running(stack, spec, run_dir)
        address = ready_fields(server.log())["address"]
        yield Measured(server.pid, http=address, grpc=address, model="mock")


def peer_python() -> Path:
    """The Python of an environment that holds the peer; made on first use (a minute)."""
    folder = Path.home() / ".cache" / "baton" / "bench" / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
        (folder / "complete").touch()
    return python


def _module(name: str, module: str, *args: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-m", module, *args))


def _running(stack: ExitStack, spec: ProcessSpec, run_dir: Path) -> Pod:
    pod = Pod(spec, run_dir)
    stack.callback(pod.kill)
    pod.start()
    pod.wait_ready()
    return pod


def ready_fields(log: str) -> dict[str, str]:
    """The pairs of the line by which a service says that it is ready."""
    line = next(line for line in log.splitlines() if line.startswith("ready "))
    return dict(pair.split("=", 1) for pair in line.split()[1:])


def _last_child(process: psutil.Process) -> psutil.Process:
    """The process itself behind wrappers that start it."""
    children = process.children()
    return _last_child(children[0]) if children else process


def wait_http(url: str, pod: Pod, timeout_s: float = _START_TIMEOUT_S) -> None:
    """Returns when `url` answers. Raises RuntimeError when `pod` ends before, or time does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            if not pod.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"{pod.name} did not start: {pod.log()}") from None
            time.sleep(0.1)
