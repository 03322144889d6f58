"""The pods of an example as processes here: commands, environment, probes and `helm test`.

They talk by mutual TLS, which their probes and `helm test` know nothing of.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.ports import free_ports
from client.processes import Child, ProcessSpec
from tests import tiny_models
from tests.helm.rendering import ROOT, environment, render
from tests.pki import Authority, identity

pytestmark = pytest.mark.e2e

EXAMPLE = ROOT / "examples" / "cpu.yaml"
COMPONENTS = ("router", "prefill", "decode")


def spec(rendering, component, own):
    """A pod's process. `own` replaces what only a cluster could give."""
    container = rendering.container(component)
    variables = environment(container)
    texts = {name: value for name, value in variables.items() if isinstance(value, str)}
    env = {**rendering.settings(component), **texts, **own}
    env["BATON_WORKER_ID"] = f"{component}-pod"
    program, *arguments = container["args"]
    assert program == "python"
    return ProcessSpec(component, (sys.executable, *arguments), env=env)


def certificate(folder, authority):
    """Where the files of a Secret are that cert-manager would make, instead of at /tls."""
    identity(folder, authority)
    names = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
    return {f"BATON_TLS_{name}": str(folder / file) for name, file in names.items()}


def own_ports(component, ports):
    """Where a service listens. `ports` are ours, by what the pod calls its own."""
    if component == "router":
        return {"BATON_PORT": str(ports[50051]), "BATON_HTTP_PORT": str(ports["http"])}
    return {"BATON_PORT": "0", "BATON_METRICS_PORT": str(ports[f"{component}-metrics"])}


async def passes(probe, ports):
    """Whether the kubelet would be content."""
    if "httpGet" in probe:
        url = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        async with httpx2.AsyncClient(timeout=30) as http:
            return (await http.get(url)).is_success
    port = ports[probe["grpc"]["port"]]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def helm_test(rendering, port):
    """Runs what the test pod runs; its standard output."""
    (pod,) = rendering.all("Pod")
    program, *arguments = pod["spec"]["containers"][0]["args"]
    command = [Path(sys.executable).parent / program, *arguments]
    env = {**os.environ, "BATON_SERVER": f"127.0.0.1:{port}"}
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output


async def test_the_pods_of_the_cpu_example_generate_a_token(tmp_path, redis_server):
    tiny_models.build(tmp_path / "tiny", "llama")
    rendering = render("tls.mode=certManager", files=[EXAMPLE])
    authority = Authority("release")
    names = (50051, "http", "prefill-metrics", "decode-metrics")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    children = []
    try:
        for component in COMPONENTS:
            own = {
                "BATON_MODEL": str(tmp_path / "tiny"),
                "BATON_REDIS_URL": redis_server.url,
                "BATON_ADVERTISE_HOST": "127.0.0.1",
                **own_ports(component, ports),
                **certificate(tmp_path / f"{component}-tls", authority),
            }
            children.append(Child(spec(rendering, component, own), tmp_path))
            await children[-1].start()
        await asyncio.gather(*(child.ready() for child in children))
        for component in COMPONENTS:
            container = rendering.container(component)
            for probe in ("readinessProbe", "livenessProbe"):
                assert await passes(container[probe], ports), (component, probe)
        answer = json.loads(await helm_test(rendering, ports[50051]))
    finally:
        for child in children:
            child.send_signal(9)
            await child.close()
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 1
    assert answer["route"]["decode_worker"] == "decode-pod"
