"""`python -m router` as an operator sees it."""

import asyncio
import signal
import socket
import sys

import httpx2
import pytest

from baton.v1 import types_pb2
from core.registry import Registry
from tests.model_folder import write_model_folder
from tests.router.fakes import FakeWorker, Script
from tests.router.stack import REPLY


@pytest.fixture
async def start(tmp_path, redis_server):
    """Starts routers; none of them outlives the test."""
    folder = write_model_folder(tmp_path / "tiny")
    processes = []

    async def start_router(*flags):
        arguments = ["--model", str(folder), "--redis-url", redis_server.url, *flags]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield start_router
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_router_says_when_it_is_ready_and_stops_on_a_signal(start, redis, number):
    workers = [
        FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script(REPLY)),
        FakeWorker("decode-0", types_pb2.ROLE_DECODE, Script(REPLY)),
    ]
    for worker in workers:
        await worker.start(Registry(redis, lease_s=600))
    router = await start("--port", "0")
    async with asyncio.timeout(60):
        line = await router.stdout.readline()
    assert line.startswith(b"ready grpc=127.0.0.1:")

    router.send_signal(number)
    assert await router.wait() == 0
    assert await router.stdout.read() == b""
    for worker in workers:
        await worker.stop()


async def test_the_ready_line_tells_where_the_http_api_listens(start, redis):
    workers = [
        FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script(REPLY)),
        FakeWorker("decode-0", types_pb2.ROLE_DECODE, Script(REPLY)),
    ]
    for worker in workers:
        await worker.start(Registry(redis, lease_s=600))
    router = await start("--port", "0", "--http-port", "0")
    async with asyncio.timeout(60):
        line = (await router.stdout.readline()).decode()
    fields = dict(pair.split("=") for pair in line.split()[1:])
    async with httpx2.AsyncClient(base_url=f"http://{fields['http']}", timeout=30) as http:
        assert (await http.get("/health")).status_code == 200
        router.send_signal(signal.SIGTERM)
        assert await router.wait() == 0
    for worker in workers:
        await worker.stop()


async def test_without_workers_a_router_listens_but_is_not_ready(start):
    router = await start("--port", "0")
    async with asyncio.timeout(60):
        while b"registry_reached" not in await router.stderr.readline():
            pass
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await router.stdout.readline()
    router.send_signal(signal.SIGTERM)
    assert await router.wait() == 0


async def test_a_used_port_is_one_line_and_exit_code_one(start):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        router = await start("--port", str(port))
        _, said = await router.communicate()
    assert router.returncode == 1
    assert said.decode().splitlines()[-1].startswith(f"error: cannot listen on 127.0.0.1:{port}")


async def test_a_used_http_port_is_one_line_and_exit_code_one(start):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        router = await start("--port", "0", "--http-port", str(port))
        _, said = await router.communicate()
    assert router.returncode == 1
    assert said.decode().splitlines()[-1].startswith(f"error: cannot listen on 127.0.0.1:{port}")


async def test_api_keys_that_cannot_be_read_are_one_line_and_exit_code_one(start, tmp_path):
    router = await start("--port", "0", "--api-keys", str(tmp_path / "none"))
    _, said = await router.communicate()
    assert router.returncode == 1
    assert said.decode().startswith("error: the API keys ")
    assert said.count(b"\n") == 1


async def test_a_missing_model_is_one_line_and_exit_code_one(start, tmp_path):
    router = await start("--model", str(tmp_path / "missing"))
    _, said = await router.communicate()
    assert router.returncode == 1
    assert said.decode().startswith("error: model folder ")
    assert said.count(b"\n") == 1


async def test_defaults_that_no_request_may_have_are_one_line_and_exit_code_one(start, tmp_path):
    content = '{"do_sample": true, "repetition_penalty": 0}'
    (tmp_path / "tiny/generation_config.json").write_text(content)
    router = await start("--port", "0")
    _, said = await router.communicate()
    assert router.returncode == 1
    last = said.decode().splitlines()[-1]
    assert "generation_config.json: repetition_penalty must be greater than 0" in last
