"""Calls to servers of grpcio."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.grpc_client.status import CallFailed
from tests.router.grpc_client.conftest import PATIENCE_S, called, grpc_server, outcome, read_all
from tests.router.stack import wait_for

MESSAGES = [b"a", b"", b"b" * 3_000_000, b"c"]


async def test_messages_go_both_ways_in_order_until_the_server_ends_the_call():
    async with grpc_server() as (address, probe, _), called(address) as call:
        for message in (*MESSAGES, b"end"):
            call.send(message)
        assert await read_all(call) == ([b"re: " + message for message in MESSAGES], "OK")
        assert probe.ended.is_set()


async def test_an_error_of_the_service_comes_with_its_message():
    async with grpc_server() as (address, _, _), called(address) as call:
        call.send(b"first")
        call.send("fail: 100% schön".encode())
        assert await read_all(call) == ([b"re: first"], "ABORTED: 100% schön")


async def test_a_method_that_is_not_there_is_told():
    async with grpc_server() as (address, _, _), called(address, method="Nothing") as call:
        call.send(b"x")
        assert await read_all(call) == ([], "UNIMPLEMENTED: Method not found!")


async def test_a_call_that_is_closed_ends_its_servicer():
    async with grpc_server() as (address, probe, _):
        async with called(address) as call:
            call.send(b"x")
            await call.read(PATIENCE_S)
            assert not call._timer.cancelled()
        await probe.ended.wait()
        assert call._timer.cancelled()
        assert call._transport.is_closing()
        with pytest.raises(CallFailed, match="CANCELLED: the call was closed"):
            await call.read(PATIENCE_S)


async def test_a_call_that_is_closed_in_the_middle_of_a_message_ends_its_servicer():
    async with grpc_server() as (address, probe, _):
        async with called(address) as call:
            call.send(b"x")
            await call.read(PATIENCE_S)
            call.send(bytes(30_000_000))
        await probe.ended.wait()


async def test_a_cancelled_caller_closes_its_call():
    async with grpc_server() as (address, probe, _):
        is_called = asyncio.Event()

        async def wait_for_ever():
            async with called(address) as call:
                call.send(b"x")
                await call.read(PATIENCE_S)
                is_called.set()
                await call.read(PATIENCE_S)

        caller = asyncio.create_task(wait_for_ever())
        await is_called.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        await probe.ended.wait()


async def test_a_server_that_stops_ends_the_call():
    async with grpc_server() as (address, _, server), called(address) as call:
        call.send(b"x")
        assert await call.read(PATIENCE_S) == b"re: x"
        await server.stop(0)
        messages, end = await read_all(call)
        assert (messages, end.split(":")[0]) == ([], "UNAVAILABLE")


async def test_a_server_that_takes_no_new_calls_goes_on_with_this_one():
    async with grpc_server() as (address, _, server), called(address) as call:
        call.send(b"x")
        await call.read(PATIENCE_S)
        stopping = asyncio.create_task(server.stop(20))
        await wait_for(lambda: call._http2.goodbye)
        call.send(b"y")
        call.send(b"end")
        assert await read_all(call) == ([b"re: y"], "OK")
        await stopping


async def test_a_server_is_found_by_name_and_by_either_kind_of_address():
    async with grpc_server(host="[::1]") as (address, _, _), called(address) as call:
        call.send(b"end")
        assert await read_all(call) == ([], "OK")
    async with grpc_server() as (address, _, _):
        _, _, port = address.rpartition(":")
        async with called(f"localhost:{port}") as call:
            call.send(b"end")
            assert await read_all(call) == ([], "OK")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:http"])
async def test_what_is_no_address_is_unavailable(address):
    messages, end = await outcome(address)
    assert messages == []
    assert end.startswith(f"UNAVAILABLE: {address}: invalid literal")


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "x" * 70 + ".y"])
async def test_a_server_that_cannot_be_reached_is_unavailable(host):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"{host}:{unused.getsockname()[1]}"
        messages, end = await outcome(address)
    assert messages == []
    assert end.startswith(f"UNAVAILABLE: {address}: ")
