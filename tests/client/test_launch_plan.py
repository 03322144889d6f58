"""Which processes a stack has, and what they are told."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct

import pytest

from client import launch_plan
from client.launch_plan import UpConfig, default_threads, make_plan, redis_process
from client.processes import Child
from core.errors import StartupError


def flag(argv, name):
    return argv[argv.index(name) + 1]


def test_a_stack_has_redis_numbered_workers_and_a_router(tmp_path):
    plan = make_plan(UpConfig(model="/m", num_prefill=1, num_decode=2), tmp_path)
    names = [spec.name for spec in plan.others]
    assert names == ["redis", "prefill-0", "decode-0", "decode-1"]
    assert plan.others[3].argv[2:4] == ("-m", "decode_svc")
    assert flag(plan.others[3].argv, "--worker-id") == "decode-1"
    redis_urls = {flag(spec.argv, "--redis-url") for spec in (*plan.others[1:], plan.router)}
    assert len(redis_urls) == 1


def test_a_given_redis_is_used_and_none_is_started(tmp_path):
    config = UpConfig(model="/m", redis_url="redis://other:1/0")
    plan = make_plan(config, tmp_path)
    assert [spec.name for spec in plan.others] == ["prefill-0", "decode-0"]
    assert flag(plan.router.argv, "--redis-url") == "redis://other:1/0"


def test_workers_of_two_stacks_in_one_redis_have_different_ids(tmp_path):
    config = UpConfig(model="/m", redis_url="redis://other:1/0", num_decode=2)
    one, other = make_plan(config, tmp_path), make_plan(config, tmp_path)
    assert flag(one.others[2].argv, "--worker-id") == one.decode_ids[1]
    assert one.decode_ids[1].startswith("decode-1-")
    assert len(one.worker_ids) == 3
    assert not one.worker_ids & other.worker_ids


def test_flags_reach_the_role_that_they_are_meant_for(tmp_path):
    config = UpConfig(
        model="/m",
        redis_url="redis://r",
        port=7,
        served_model_name="name",
        threads_per_worker=3,
        kv_transport="tcp",
        worker_args=("--dtype", "float32"),
        decode_args=("--num-gpu-blocks-override", "24"),
        router_args=("--x", "1"),
    )
    plan = make_plan(config, tmp_path)
    prefill, decode = (spec.argv for spec in plan.others)
    assert "--num-gpu-blocks-override" not in prefill
    assert decode[-2:] == ("--num-gpu-blocks-override", "24")
    for argv in (prefill, decode):
        assert (flag(argv, "--dtype"), flag(argv, "--threads")) == ("float32", "3")
        assert (flag(argv, "--model"), flag(argv, "--kv-transport")) == ("/m", "tcp")
    assert flag(plan.router.argv, "--port") == "7"
    assert flag(plan.router.argv, "--served-model-name") == "name"
    assert plan.router.argv[-2:] == ("--x", "1")


def test_the_http_api_and_its_keys_are_the_routers(tmp_path):
    (tmp_path / "keys").write_text("first gold\nsecond\n")
    config = UpConfig(model="/m", redis_url="redis://r", http_port=0, api_keys=tmp_path / "keys")
    plan = make_plan(config, tmp_path)
    assert flag(plan.router.argv, "--http-port") == "0"
    assert flag(plan.router.argv, "--api-keys") == str(tmp_path / "keys")
    assert plan.api_key == "first"
    assert "--api-keys" not in plan.others[0].argv


def test_without_a_port_there_is_no_http_api(tmp_path):
    plan = make_plan(UpConfig(model="/m", redis_url="redis://r"), tmp_path)
    assert "--http-port" not in plan.router.argv
    assert plan.api_key is None


def test_api_keys_that_cannot_be_read_are_an_error_before_anything_starts(tmp_path):
    config = UpConfig(model="/m", redis_url="redis://r", api_keys=tmp_path / "none")
    with pytest.raises(StartupError, match="none cannot be read"):
        make_plan(config, tmp_path)


def test_workers_choose_how_kv_moves_unless_they_are_told(tmp_path):
    plan = make_plan(UpConfig(model="/m", redis_url="redis://r"), tmp_path)
    assert [flag(spec.argv, "--kv-transport") for spec in plan.others] == ["auto", "auto"]


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [default_threads(count) for count in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_without_any_redis_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="no redis-server: install"):
        launch_plan.find_redis()


async def test_a_redis_that_resets_the_connection_is_asked_again(tmp_path):
    num_asked = 0

    async def serve(reader, writer):
        nonlocal num_asked
        num_asked += 1
        await reader.readline()
        if num_asked == 1:
            no_farewell = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, no_farewell
            )
        else:
            writer.write(b"+PONG\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        spec, _ = redis_process(tmp_path, server.sockets[0].getsockname()[1])
        await asyncio.wait_for(spec.probe(), 30)
    assert num_asked == 2


async def test_the_own_redis_starts_and_answers(tmp_path):
    spec, url = redis_process(tmp_path)
    redis = Child(spec, tmp_path)
    await redis.start()
    await asyncio.wait_for(redis.ready(), 60)
    assert url.startswith("redis://127.0.0.1:")
    redis.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(redis.exited(), 60) == "exited with code 0"
    await redis.close()
