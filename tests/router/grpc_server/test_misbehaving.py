"""Clients that break gRPC's rules, or flood the server."""

from __future__ import annotations

import grpc
import pytest

from core.http2.frames import END_STREAM, NUMBER, ErrorCode, Kind, frame
from router.grpc_server import call as grpc_call
from router.grpc_server import connection, http2
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, data_frame, message, settings
from tests.router.grpc_server.peers import headers_frame, request_to
from tests.router.stack import wait_for

PING = frame(Kind.PING, 0, 0, bytes(8))
RESOURCE_EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])


def reset(stream_id: int) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream_id, NUMBER.pack(ErrorCode.CANCEL))


def call(stream_id: int, method="Echo", *data: bytes, headers=()) -> bytes:
    """A call whose request is `data`, in one DATA frame."""
    begun = headers_frame(stream_id, headers=request_to(method, *headers))
    return begun + data_frame(stream_id, b"".join(data))


async def still_serves(raw, stream_id: int = 9999) -> None:
    """Whether calls on the same connection are answered."""
    raw.send(call(stream_id, "Echo", message(b"x")))
    while (received := await raw.until(Kind.DATA))[2] != stream_id:
        pass
    assert received[3] == message(b"re: x")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", grpc.StatusCode.UNIMPLEMENTED),
        (message(b"a") + message(b"b"), grpc.StatusCode.UNIMPLEMENTED),
        (message(b"a") + b"\0", grpc.StatusCode.UNIMPLEMENTED),
        (message(b"abc")[:-1], grpc.StatusCode.INTERNAL),
        (b"\0\0", grpc.StatusCode.INTERNAL),
        (b"\1" + message(b"abc")[1:], grpc.StatusCode.INTERNAL),
        (b"\0\xff\xff\xff\xff", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_method_of_one_message_takes_one(serve, data, status):
    async with serve() as s, s.raw() as raw:
        raw.send(call(1, "Echo", data))
        assert (await raw.headers())["grpc-status"] == str(status.value[0])
        await still_serves(raw)


@pytest.mark.parametrize("data", [message(b"abc")[:-1], b"\1" + message(b"abc")[1:]])
async def test_a_stream_of_requests_may_end_badly(serve, data):
    async with serve() as s, s.raw() as raw:
        raw.send(call(1, "Chat", message(b"good"), data))
        assert (await raw.until(Kind.DATA))[3] == message(b"re: good")
        assert (await raw.headers())["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])
        await still_serves(raw)


async def test_a_message_that_is_no_protobuf_is_refused(serve):
    async with serve() as s:
        method = s.channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed") as caught:
            await method(b"\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (":method", "GET", "405"),
        ("content-type", "text/plain", "415"),
    ],
)
async def test_what_is_not_grpc_is_answered_in_http(serve, name, value, status):
    replaced = [(each, value if each == name else old) for each, old in request_to("Echo")]
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, END_STREAM, replaced))
        assert await raw.headers() == {":status": status}
        await still_serves(raw)


async def test_http_1_is_turned_away(serve):
    async with serve() as s, s.raw(preface=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as raw:
        assert await raw.goodbye() == ErrorCode.PROTOCOL_ERROR


async def test_an_error_of_the_connection_ends_its_calls_and_no_others(serve):
    async with serve() as s, s.raw() as raw:
        other = s.stream("Hold")(b"other")
        assert await other.read() == b"other"
        raw.send(call(1, "Chat", message(b"x")), frame(Kind.PING, 0, 7, bytes(8)))
        assert await raw.goodbye() == ErrorCode.PROTOCOL_ERROR
        await wait_for(lambda: len(s.shared.tasks) == 1)
        other.cancel()


async def test_calls_that_are_reset_as_fast_as_they_are_made_leave_nothing(serve):
    async with serve() as s, s.raw() as raw:
        for first in range(1, 8000, 400):
            ids = range(first, first + 400, 2)
            raw.send(*(call(each, "Hold", message(b"x")) + reset(each) for each in ids))
        await still_serves(raw)
        await wait_for(lambda: not s.shared.tasks)
        assert s.connection._http2.streams == s.connection._calls == {}


async def test_calls_beyond_the_limit_are_refused_and_can_be_made_again(serve, monkeypatch):
    monkeypatch.setattr(http2, "MAX_STREAMS", 3)
    async with serve() as s, s.raw() as raw:
        raw.send(*(call(each, "Hold", message(b"x")) for each in (1, 3, 5, 7)))
        received = await raw.until(Kind.RST_STREAM)
        assert received[2:] == (7, NUMBER.pack(ErrorCode.REFUSED_STREAM))
        raw.send(reset(3))
        await still_serves(raw)


@pytest.mark.parametrize(
    "flood",
    [
        PING,
        settings((INITIAL_WINDOW_SIZE, 1), (INITIAL_WINDOW_SIZE, 1 << 20)),
        frame(Kind.DATA, 0, 1, b""),
        frame(2, 0, 1, bytes(5)),
        frame(Kind.WINDOW_UPDATE, 0, 1, NUMBER.pack(1)),
    ],
    ids=["ping", "settings", "empty data", "priority", "room"],
)
async def test_floods_that_are_read_are_lived_through(serve, flood):
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, headers=request_to("Chat")))
        for _ in range(20):
            raw.send(flood * 1000)
        await still_serves(raw)


async def test_answers_to_a_flood_do_not_pile_up_for_who_does_not_read(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(PING * 1_000_000)
        await wait_for(lambda: s.connection._is_write_paused)
        assert s.connection._transport.get_write_buffer_size() < 2 << 20
        assert not s.connection._transport.is_reading()


async def test_data_for_refused_calls_does_not_use_up_the_connections_window(serve):
    async with serve() as s, s.raw() as raw:
        for stream_id in range(1, 129, 2):
            # 32 times 1 MiB, as much as a stream's window holds, behind a length that is refused.
            piece = b"\0\xff\xff\xff\xff".ljust(1 << 18)
            raw.send(headers_frame(stream_id), data_frame(stream_id, piece, 0) * 4)
        await still_serves(raw)


async def test_metadata_beyond_the_limit_ends_the_connection(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call(1, "Echo", message(b"x"), headers=[("x", "y" * 40_000)]))
        assert await raw.goodbye() == ErrorCode.ENHANCE_YOUR_CALM


async def test_requests_that_are_not_whole_have_a_bound_together(serve, monkeypatch):
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 1100)
    whole = message(b"x" * 600)
    async with serve() as s, s.raw() as raw, s.raw() as other:
        raw.send(begun(1, "Echo", whole[:400]))
        await wait_for(lambda: s.shared.num_waiting_bytes == 400)
        other.send(begun(1, "Total", whole[:450]))
        await wait_for(lambda: s.shared.num_waiting_bytes == 850)
        other.send(begun(3, "Echo", whole[:400]))
        assert (await other.headers())["grpc-status"] == RESOURCE_EXHAUSTED
        await still_serves(other)
        raw.send(data_frame(1, whole[400:]))
        assert (await raw.until(Kind.DATA))[3] == message(b"re: " + b"x" * 600)
        assert s.shared.num_waiting_bytes == 450
        other.send(reset(1))
        await wait_for(lambda: s.shared.num_waiting_bytes == 0)


async def test_who_has_the_most_that_is_not_whole_makes_room_for_others(serve, monkeypatch):
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 1000)
    whole = message(b"x" * 2000)
    async with serve() as s, s.raw() as greedy, s.raw() as other:
        greedy.send(begun(1, "Echo", whole[:390]), begun(3, "Echo", whole[:610]))
        await wait_for(lambda: s.shared.num_waiting_bytes == 1000)
        await still_serves(other)
        assert (await greedy.headers())["grpc-status"] == RESOURCE_EXHAUSTED
        assert s.shared.num_waiting_bytes == 390
        await still_serves(greedy)


async def test_a_request_that_does_not_come_whole_ends(serve, monkeypatch):
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(grpc_call, "_REQUEST_TIMEOUT_S", 0.1)
    async with serve() as s, s.raw() as raw:
        raw.send(call(1, "Hold", message(b"x")), begun(3, "Chat", message(b"y")))
        raw.send(begun(5, "Echo", b"\0"))
        while "grpc-status" not in (headers := await raw.headers()):
            pass
        assert headers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        assert "did not come" in headers["grpc-message"]
        assert len(s.connection._calls) == 2
        await still_serves(raw)


async def test_half_a_message_of_a_stream_is_not_held_for_ever(serve, monkeypatch):
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(grpc_call, "_REQUEST_TIMEOUT_S", 0.1)
    async with serve() as s, s.raw() as raw:
        raw.send(begun(1, "Chat", message(b"x")))
        assert (await raw.until(Kind.DATA))[3] == message(b"re: x")
        raw.send(data_frame(1, message(b"y")[:-1], flags=0))
        status = (await raw.headers())["grpc-status"]
        assert status == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        assert s.shared.num_waiting_bytes == 0
        await still_serves(raw)


def begun(stream_id: int, method: str, data: bytes) -> bytes:
    """A call whose request goes on."""
    headers = headers_frame(stream_id, headers=request_to(method))
    return headers + data_frame(stream_id, data, flags=0)
