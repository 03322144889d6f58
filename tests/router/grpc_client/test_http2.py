"""HTTP/2 of a client, fed with frames and with what the h2 library sends as a server."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import pytest

from core.http2.base import encode_headers
from core.http2.frames import (
    END_HEADERS,
    END_STREAM,
    NUMBER,
    PREFACE,
    ErrorCode,
    Http2Error,
    Kind,
    frame,
)
from tests.core.http2 import wire
from tests.core.http2.wire import frames_in, reset
from tests.router.grpc_client.peers import ANSWER, OK, Client, data_frame, headers_frame, trailers

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b"), (b":authority", b"x")]


def go_away(last_stream_id: int, code: int, reason: bytes = b"") -> bytes:
    return frame(Kind.GOAWAY, 0, 0, NUMBER.pack(last_stream_id) + NUMBER.pack(code) + reason)


def refusal(*data: bytes) -> ErrorCode:
    """How a connection with stream 1 ends that gets `data`."""
    client = Client()
    client.stream()
    with pytest.raises(Http2Error) as caught:
        client.http2.receive(b"".join(data))
    return caught.value.code


def test_another_implementation_is_asked_and_answers():
    client = Client(is_begun=False)
    config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
    server = h2.connection.H2Connection(config)
    server.initiate_connection()
    stream = client.http2.open(encode_headers(REQUEST))
    client.http2.send_data(stream, b"question")
    events = server.receive_data(client.sent())
    assert [type(event) for event in events if hasattr(event, "stream_id")][-2:] == [
        h2.events.RequestReceived,
        h2.events.DataReceived,
    ]
    server.send_headers(1, ANSWER)
    server.send_data(1, b"answer")
    server.send_headers(1, OK, end_stream=True)
    client.http2.receive(server.data_to_send())
    assert client.told == [
        ("headers", 1, {b":status": b"200", b"content-type": b"application/grpc"}),
        ("data", 1, b"answer"),
        ("headers", 1, {b"grpc-status": b"0"}),
        ("end", 1),
    ]
    assert stream.is_ended


def test_a_client_begins_with_the_preface_and_takes_no_push():
    sent = Client(is_begun=False).sent()
    assert sent.startswith(PREFACE)
    (kind, _, _, payload), *_ = frames_in(sent.removeprefix(PREFACE))
    assert (kind, payload[:6]) == (Kind.SETTINGS, b"\0\2" + bytes(4))


def test_streams_have_odd_numbers():
    client = Client()
    assert [client.stream().id for _ in range(3)] == [1, 3, 5]


def test_headers_may_end_a_stream():
    client = Client()
    client.stream()
    client.http2.receive(trailers())
    assert client.told == [("headers", 1, {b"grpc-status": b"0"}), ("end", 1)]


def test_headers_behind_the_end_reset_the_stream():
    client = Client()
    client.stream()
    assert client.answer(trailers(), trailers()) == [reset(1, ErrorCode.STREAM_CLOSED)]
    assert client.told[-1] == ("reset", 1, ErrorCode.STREAM_CLOSED)


def test_a_stream_that_was_reset_is_not_spoken_of_again():
    client = Client()
    client.http2.reset(client.stream(), ErrorCode.CANCEL)
    client.sent()
    assert client.answer(data_frame(b"x"), trailers(), frame(Kind.RST_STREAM, 0, 1, bytes(4))) == []
    assert client.told == []


def test_going_away_ends_the_streams_that_are_not_served_and_no_others():
    client = Client()
    client.stream(), client.stream()
    client.told.clear()
    client.http2.receive(go_away(1, 11, b"too_many_pings"))
    assert client.told == [("reset", 3, ErrorCode.REFUSED_STREAM)]
    assert client.http2.goodbye == "ENHANCE_YOUR_CALM too_many_pings"
    client.http2.receive(go_away(0, 99))
    assert client.told[1:] == [("reset", 1, ErrorCode.REFUSED_STREAM)]
    assert client.http2.goodbye == "error 99"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(Kind.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (wire.headers_frame(2, ANSWER), ErrorCode.PROTOCOL_ERROR),
        (wire.headers_frame(3, ANSWER), ErrorCode.PROTOCOL_ERROR),
        (wire.headers_frame(0, ANSWER), ErrorCode.PROTOCOL_ERROR),
        (wire.data_frame(3, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.HEADERS, END_HEADERS, 1, b"\xff" * 20), ErrorCode.COMPRESSION_ERROR),
        (headers_frame([("x", "y" * 40_000)], END_STREAM), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(data, code):
    assert refusal(data) == code


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x03\0\x02\x02\x46" * 2, go_away(0, 0)]
)
def test_a_server_begins_with_settings(data):
    client = Client(is_begun=False)
    with pytest.raises(Http2Error, match="PROTOCOL_ERROR: settings come first"):
        client.http2.receive(data)
