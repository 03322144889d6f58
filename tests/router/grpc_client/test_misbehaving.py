"""Servers that break the rules of HTTP/2 or gRPC, leave, or say nothing."""

from __future__ import annotations

import socket

import pytest

from core.http2.frames import (
    END_HEADERS,
    END_STREAM,
    MAX_FRAME_BYTES,
    NUMBER,
    ErrorCode,
    Kind,
    frame,
)
from core.rpc import MAX_MESSAGE_BYTES
from router.grpc_client.connect import open_call
from tests.core.http2.wire import message
from tests.router.grpc_client.conftest import PATIENCE_S, called, outcome, raw_server, read_all
from tests.router.grpc_client.peers import (
    ANSWER,
    BEGINNING,
    data_frame,
    headers_frame,
    trailers,
)

HELLO = BEGINNING + headers_frame() + data_frame(message(b"hello"))
RESET = NUMBER.pack(ErrorCode.CANCEL)


def go_away(last_stream_id: int, reason: bytes = b"") -> bytes:
    return frame(Kind.GOAWAY, 0, 0, NUMBER.pack(last_stream_id) + NUMBER.pack(0) + reason)


async def answered(*data: bytes) -> tuple[list[bytes], str]:
    """The outcome of a call that is answered with `data`."""

    async def act(peer):
        await peer.until(Kind.HEADERS)
        peer.send(*data)

    async with raw_server(act) as address:
        return await outcome(address)


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "PROTOCOL_ERROR: settings come first"),
        (headers_frame() + trailers(), "PROTOCOL_ERROR: settings come first"),
        (
            BEGINNING + frame(Kind.DATA, 0, 1, bytes(MAX_FRAME_BYTES + 1))[:9],
            f"FRAME_SIZE_ERROR: a frame of {MAX_FRAME_BYTES + 1} bytes",
        ),
        (
            BEGINNING + frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4)),
            "PROTOCOL_ERROR: push is not taken",
        ),
    ],
)
async def test_what_is_not_http2_makes_the_server_unavailable(data, end):
    expected = f"UNAVAILABLE: what comes is not HTTP/2 as it should be: {end}"
    assert await answered(data) == ([], expected)


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (data_frame(b"x"), "INTERNAL: data without headers"),
        (headers_frame() * 2, "INTERNAL: headers among messages"),
        (headers_frame() + data_frame(b"", END_STREAM), "UNKNOWN: an end without grpc-status"),
        (trailers(), "OK"),
        (trailers(*ANSWER), "UNKNOWN: an end without grpc-status, HTTP status 200"),
        (trailers(*ANSWER, ("grpc-status", "14"), ("grpc-message", "no")), "UNAVAILABLE: no"),
        (headers_frame([(":status", "503")]), "UNAVAILABLE: an end without grpc-status, HTTP"),
        (headers_frame([(":status", "200"), ("content-type", "text/html")]), "UNKNOWN: this is"),
        (go_away(0), "UNAVAILABLE: the stream was reset: REFUSED_STREAM"),
        (frame(Kind.RST_STREAM, 0, 1, RESET), "CANCELLED: the stream was reset: CANCEL"),
    ],
)
async def test_a_call_without_messages_has_an_end(data, end):
    messages, ended = await answered(BEGINNING, data)
    assert (messages, ended[: len(end)]) == ([], end)


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (trailers(), "OK"),
        (trailers(("grpc-status", "8"), ("grpc-message", "full")), "RESOURCE_EXHAUSTED: full"),
        (data_frame(message(b"abc")[:-1]) + trailers(), "INTERNAL: the last message is not whole"),
        (data_frame(b"\0\0") + trailers(), "INTERNAL: the last message is not whole"),
        (data_frame(b"\0\0") + trailers(("grpc-status", "10")), "ABORTED: "),
        (data_frame(b"\1" + message(b"x")[1:]), "INTERNAL: a message is compressed, and no"),
        (
            data_frame(message(b"x") + b"\0" + NUMBER.pack(MAX_MESSAGE_BYTES + 1)),
            "RESOURCE_EXHAUSTED: a message has 33554433 bytes; at most 33554432 are taken",
        ),
        (frame(Kind.RST_STREAM, 0, 1, NUMBER.pack(2)), "INTERNAL: the stream was reset"),
        (data_frame(bytes(1 << 18)) * 5, "INTERNAL: the stream was reset: FLOW_CONTROL_ERROR"),
        (go_away(1) + data_frame(message(b"more")) + trailers(), "OK"),
        (trailers() + data_frame(message(b"late")) + frame(Kind.PING, 0, 1, bytes(8)), "OK"),
    ],
)
async def test_messages_that_are_whole_come_before_the_end(data, end):
    messages, ended = await answered(HELLO, data)
    assert (messages[0], ended[: len(end)]) == (b"hello", end)
    assert b"late" not in messages


async def test_informational_headers_and_headers_in_pieces_are_read():
    early = headers_frame([(":status", "103"), ("link", "x")])
    whole = headers_frame()[9:]
    pieces = [frame(Kind.CONTINUATION, 0, 1, whole[index : index + 1]) for index in range(1, 5)]
    begun = frame(Kind.HEADERS, 0, 1, whole[:1])
    last = frame(Kind.CONTINUATION, END_HEADERS, 1, whole[5:])
    assert await answered(
        BEGINNING, early * 2, begun, *pieces, last, data_frame(message(b"x")), trailers()
    ) == ([b"x"], "OK")


async def test_a_server_that_leaves_says_why_if_it_does():
    async def leave(peer):
        await peer.until(Kind.DATA)
        peer.send(HELLO, go_away(1, b"bye"))
        await peer.finish()

    async with raw_server(leave) as address:
        messages, end = await outcome(address)
    assert messages == [b"hello"]
    assert end.startswith("UNAVAILABLE: the connection was lost")
    assert end.endswith("; GOAWAY: NO_ERROR bye")


async def test_a_server_that_cuts_the_connection_is_unavailable():
    async def cut(peer):
        await peer.until(Kind.DATA)
        peer.send(HELLO, data_frame(message(b"abc")[:-1]))
        await peer.next()
        await peer.close()

    async with raw_server(cut) as address, called(address) as call:
        call.send(b"hello")
        assert await call.read(PATIENCE_S) == b"hello"
        call.send(b"more")
        messages, end = await read_all(call)
    assert messages == []
    assert end.startswith("UNAVAILABLE: the connection was lost")


@pytest.mark.parametrize("data", [b"", BEGINNING, BEGINNING + headers_frame()])
async def test_a_server_that_says_nothing_is_left_after_a_while(data):
    async def say(peer):
        peer.send(data)
        assert await peer.reset_code() == ErrorCode.CANCEL
        await peer.ends()

    async with raw_server(say) as address:
        with pytest.raises(TimeoutError):
            async with called(address) as call:
                await call.read(0.05)


async def test_a_host_that_drops_what_it_is_sent_is_given_up():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = f"127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError):
            async with open_call(address, "/a/b", None, 0.2):
                raise AssertionError("it is connected")
        for each in waiting:
            each.close()


async def test_who_breaks_the_protocol_is_told():
    codes = []

    async def ping(peer):
        await peer.until(Kind.DATA)
        peer.send(HELLO, frame(Kind.PING, 0, 1, bytes(8)))
        codes.append(await peer.goodbye())

    async with raw_server(ping) as address:
        messages, end = await outcome(address)
    assert (messages, end.split(":")[0]) == ([b"hello"], "UNAVAILABLE")
    assert codes == [ErrorCode.PROTOCOL_ERROR]
