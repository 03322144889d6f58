"""The pods of an example as processes here: commands, environment, probes and `helm test`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.processes import Child, ProcessSpec
from tests import tiny_models
from tests.helm.rendering import ROOT, environment, render
from tests.redis_server import free_port

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


async def is_serving(port):
    """What the kubelet's gRPC probe asks."""
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
    rendering = render(files=[EXAMPLE])
    ports = {component: free_port() for component in (*COMPONENTS, "http")}
    children = []
    try:
        for component in COMPONENTS:
            own = {
                "BATON_MODEL": str(tmp_path / "tiny"),
                "BATON_REDIS_URL": redis_server.url,
                "BATON_ADVERTISE_HOST": "127.0.0.1",
                "BATON_PORT": str(ports[component]),
                "BATON_HTTP_PORT": str(ports["http"]),
            }
            children.append(Child(spec(rendering, component, own), tmp_path))
            await children[-1].start()
        await asyncio.gather(*(child.ready() for child in children))
        assert [await is_serving(ports[component]) for component in COMPONENTS] == [True] * 3
        answer = json.loads(await helm_test(rendering, ports["router"]))
    finally:
        for child in children:
            child.send_signal(9)
            await child.close()
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 1
    assert answer["route"]["decode_worker"] == "decode-pod"
