"""How the server stops, and how connections end that nobody uses."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from core.http2.frames import ACK, NUMBER, ErrorCode, Kind, frame
from router.grpc_server import connection
from router.grpc_server.server import GrpcServer
from tests.core.http2.wire import data_frame, message, room_for
from tests.router.grpc_server.peers import BEGINNING, headers_frame, request_to
from tests.router.stack import wait_for


async def test_calls_in_flight_may_end_while_the_server_stops(serve):
    ended = asyncio.Event()

    async def finish(request, context):
        await ended.wait()
        return b"done"

    async with serve(Finish=grpc.unary_unary_rpc_method_handler(finish)) as s:
        call = s.unary("Finish")(b"")
        await wait_for(lambda: s.shared.tasks)
        stopping = asyncio.create_task(s.server.stop(60))
        await asyncio.sleep(0.01)
        ended.set()
        assert await call == b"done"
        await stopping


async def test_calls_in_flight_end_with_the_grace(serve):
    async with serve() as s:
        call = s.stream("Hold")(b"x")
        assert await call.read() == b"x"
        await s.server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert s.probe.ended.is_set()


async def test_a_second_stop_shortens_the_grace_of_the_first(serve):
    async with serve() as s:
        call = s.stream("Hold")(b"x")
        assert await call.read() == b"x"
        stopping = asyncio.create_task(s.server.stop(600))
        await asyncio.sleep(0)
        await s.server.stop(0)
        await stopping
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_leaves_as_the_server_stops_is_no_error_on_asyncios_own_loop():
    async def leave():
        server, loop = GrpcServer("127.0.0.1", 0), asyncio.get_running_loop()
        host, port = (await server.start([])).split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, BEGINNING)
            answer = b""
            while not answer.endswith(frame(Kind.SETTINGS, ACK, 0, b"")):
                answer += await loop.sock_recv(client, 1024)
        await server.stop(0)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(leave())


async def test_a_stopping_server_refuses_new_calls_of_old_clients(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, headers=request_to("Hold")), data_frame(1, message(b"x")))
        await raw.until(Kind.DATA)
        stopping = asyncio.create_task(s.server.stop(60))
        assert (await raw.until(Kind.GOAWAY))[3] == NUMBER.pack(1) + NUMBER.pack(0)
        raw.send(headers_frame(3, headers=request_to("Echo")))
        assert await raw.until(Kind.RST_STREAM) == (
            Kind.RST_STREAM,
            0,
            3,
            NUMBER.pack(ErrorCode.REFUSED_STREAM),
        )
        raw.send(frame(Kind.RST_STREAM, 0, 1, NUMBER.pack(ErrorCode.CANCEL)))
        await raw.ends()
        await raw.close()
        await stopping


async def test_answers_outlive_what_a_client_sends_while_the_server_leaves(serve):
    async with serve() as s, s.raw(window=16 << 20) as raw:
        request = message(b"1 %d" % (8 << 20))
        raw.send(headers_frame(1, headers=request_to("Write")), data_frame(1, request))
        await wait_for(lambda: s.connection._is_write_paused)
        stopping = asyncio.create_task(s.server.stop(60))
        num_bytes = 0
        while num_bytes < 5 + (8 << 20):
            num_bytes += len((await raw.until(Kind.DATA))[3])
            raw.send(room_for(0, 1))
        assert (await raw.headers())["grpc-status"] == "0"
        await raw.ends()
        await raw.close()
        await stopping


async def test_a_client_that_stays_when_told_to_leave_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(connection, "_LINGER_S", 0.01)
    async with serve() as s, s.raw() as raw:
        await raw.next()
        await s.server.stop(60)
        assert s.shared.connections == set()


async def test_a_client_that_answers_no_pings_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(connection, "KEEPALIVE_TIMEOUT_S", 0.1)
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, headers=request_to("Hold")), data_frame(1, message(b"x")))
        await raw.until(Kind.PING)
        await raw.ends()
        await s.probe.ended.wait()


async def test_a_client_that_never_says_a_word_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(connection, "KEEPALIVE_TIMEOUT_S", 0.1)
    async with serve() as s:
        host, port = s.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.read()
        writer.close()
        await wait_for(lambda: not s.shared.connections)
