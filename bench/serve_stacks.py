"""The servers that `bench.serve` measures: Baton's own stack, each worker on cores of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.pods import pod_stack
from bench.router_stacks import ready_fields
from client.launch_plan import UpConfig
from client.processes import ProcessSpec
from core.model_folder import ModelFolder

Cores = tuple[int, ...]
WHOLE_CONTEXT = 1 << 20
"""More tokens than any prompt has."""


@dataclass(frozen=True)
class Endpoint:
    """Where a load is sent: `grpc` (HOST:PORT), or else `url` as OpenAI's clients know it."""

    name: str
    model: str
    vocab_size: int
    max_model_len: int
    url: str = ""
    grpc: str = ""


@dataclass(frozen=True)
class Topology:
    """Baton's workers. `cores`: those of each worker by its name; others run anywhere."""

    name: str
    num_prefill: int = 1
    num_decode: int = 1
    cores: Mapping[str, Cores] = field(default_factory=dict)
    threads: int = 1
    worker_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()


def own_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


def disaggregated(num_prefill: int, num_decode: int, cores: Sequence[int]) -> Topology:
    """Workers that share `cores` equally, as far as there is one for each."""
    names = [f"prefill-{index}" for index in range(num_prefill)]
    names += [f"decode-{index}" for index in range(num_decode)]
    share = len(cores) // len(names)
    return Topology(
        name=f"baton {num_prefill}P{num_decode}D",
        num_prefill=num_prefill,
        num_decode=num_decode,
        cores={
            name: tuple(cores[index * share : (index + 1) * share])
            for index, name in enumerate(names)
            if share
        },
        threads=max(1, share),
    )


def colocated(chunk: int, cores: Sequence[int]) -> Topology:
    """One worker with all `cores` that computes the prompts, too, `chunk` tokens a step beside
    running sequences. A prefill worker is there, since every deployment has one, and idles."""
    return Topology(
        name=f"baton colocated {chunk}",
        cores={"decode-0": tuple(cores)},
        threads=len(cores),
        decode_args=("--local-prefill-chunk", str(chunk)),
        router_args=("--local-prefill-max-tokens", str(WHOLE_CONTEXT)),
    )


@contextmanager
def baton(topology: Topology, model: Path) -> Iterator[Endpoint]:
    """A stack that serves `model`, measured over its HTTP API. Raises RuntimeError."""
    config = UpConfig(
        model=str(model),
        num_prefill=topology.num_prefill,
        num_decode=topology.num_decode,
        http_port=0,
        threads_per_worker=topology.threads,
        worker_args=topology.worker_args,
        decode_args=topology.decode_args,
        router_args=topology.router_args,
        log_level="WARNING",
    )
    limits = ModelFolder.load(model)

    def on_its_cores(spec: ProcessSpec) -> ProcessSpec:
        return pinned(spec, topology.cores.get(spec.name, ()))

    with (
        tempfile.TemporaryDirectory(prefix="baton-serve-") as folder,
        pod_stack(config, Path(folder), on_its_cores) as stack,
    ):
        address = ready_fields(stack.router.log())["http"]
        yield Endpoint(
            name=topology.name,
            model=model.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.context_length,
            url=f"http://{address}/v1",
            grpc=stack.address,
        )


def pinned(spec: ProcessSpec, cores: Sequence[int]) -> ProcessSpec:
    """The same, on `cores` only. Nothing is pinned where the system knows no way."""
    if not cores or shutil.which("taskset") is None:
        return spec
    return replace(spec, argv=("taskset", "-c", ",".join(map(str, cores)), *spec.argv))
