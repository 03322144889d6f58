"""HTTP/2 of a server, fed with frames and with what the h2 library sends as a client."""

from __future__ import annotations

import h2.errors
import h2.events
import h2.settings
import pytest

from core.http2.base import encode_headers
from core.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    NUMBER,
    ErrorCode,
    Http2Error,
    Kind,
    frame,
)
from router.grpc_server import http2
from tests.core.http2.wire import (
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    data_frame,
    frames_in,
    reset,
    room_for,
    settings,
)
from tests.router.grpc_server.peers import REQUEST, Server, h2_client, headers_frame


def refusal(*data: bytes) -> ErrorCode:
    """How a connection with stream 1 ends that gets `data`."""
    server = Server()
    server.stream()
    with pytest.raises(Http2Error) as caught:
        server.http2.receive(b"".join(data))
    return caught.value.code


def test_another_implementation_asks_and_is_answered():
    server, client = Server(is_begun=False), h2_client()
    client.send_headers(1, REQUEST)
    client.send_data(1, b"question", end_stream=True)
    server.http2.receive(client.data_to_send())
    assert server.told == [("request", 1), ("data", 1, b"question"), ("end", 1)]

    stream = server.http2.streams[1]
    server.http2.send_headers(stream, encode_headers([(b":status", b"200")]))
    server.http2.send_data(stream, b"answer")
    server.http2.send_headers(stream, encode_headers([(b"grpc-status", b"0")]), is_last=True)
    events = client.receive_data(server.sent())
    of_stream = [type(event) for event in events if getattr(event, "stream_id", 0) == 1]
    assert of_stream == [
        h2.events.ResponseReceived,
        h2.events.DataReceived,
        h2.events.TrailersReceived,
        h2.events.StreamEnded,
    ]
    assert server.http2.streams == {}


def test_a_client_that_has_no_room_for_a_table_of_headers_is_told_that_none_is_used():
    server, client = Server(is_begun=False), h2_client()
    client.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    client.send_headers(1, REQUEST)
    server.http2.receive(client.data_to_send())
    server.http2.send_headers(server.http2.streams[1], encode_headers([(b":status", b"200")]))
    assert isinstance(client.receive_data(server.sent())[-1], h2.events.ResponseReceived)


def test_an_answer_before_the_request_is_whole_resets_without_an_error():
    server, client = Server(is_begun=False), h2_client()
    client.send_headers(1, REQUEST)
    server.http2.receive(client.data_to_send())
    block = encode_headers([(b":status", b"200"), (b"grpc-status", b"8")])
    server.http2.send_headers(server.http2.streams[1], block, is_last=True)
    events = client.receive_data(server.sent())
    assert isinstance(events[-1], h2.events.StreamReset)
    assert events[-1].error_code == h2.errors.ErrorCodes.NO_ERROR


def test_long_headers_go_on_in_more_frames():
    server, client = Server(is_begun=False), h2_client()
    client.send_headers(1, REQUEST, end_stream=True)
    server.http2.receive(client.data_to_send())
    headers = [(b":status", b"200"), *((b"x-%d" % index, b"y" * 1000) for index in range(40))]
    server.http2.send_headers(server.http2.streams[1], encode_headers(headers), is_last=True)
    events = client.receive_data(server.sent())
    received = next(event for event in events if isinstance(event, h2.events.ResponseReceived))
    assert (len(received.headers), received.stream_ended is not None) == (41, True)


def test_headers_that_end_their_stream_are_a_whole_request():
    server = Server()
    server.http2.receive(headers_frame(1, END_STREAM))
    assert server.told == [("request", 1), ("end", 1)]


def test_trailers_of_a_client_end_its_request():
    server = Server()
    server.http2.receive(headers_frame(1) + headers_frame(1, END_STREAM))
    assert server.told == [("request", 1), ("end", 1)]
    assert server.answer(headers_frame(1, END_STREAM)) == [reset(1, ErrorCode.STREAM_CLOSED)]


def test_trailers_that_end_nothing_reset_the_stream():
    server = Server()
    assert server.answer(headers_frame(1), headers_frame(1)) == [reset(1, ErrorCode.PROTOCOL_ERROR)]
    assert server.told == [("request", 1), ("reset", 1)]


def test_data_behind_the_end_resets_the_stream():
    server = Server()
    frames = server.answer(headers_frame(1, END_STREAM), data_frame(1, b"late"))
    assert frames == [reset(1, ErrorCode.STREAM_CLOSED)]
    assert server.told[-1] == ("reset", 1)


def test_a_stream_that_its_client_resets_is_not_spoken_of_again():
    server = Server()
    server.stream()
    cancel = frame(Kind.RST_STREAM, 0, 1, NUMBER.pack(ErrorCode.CANCEL))
    late = [cancel, data_frame(1, b"late"), room_for(1, 9), headers_frame(1, END_STREAM)]
    assert server.answer(cancel, *late) == []
    assert server.told == [("request", 1), ("reset", 1)]
    assert server.http2.streams == {}


def test_headers_are_decoded_even_if_nobody_wants_them():
    server, client = Server(is_begun=False), h2_client()
    client.send_headers(1, [*REQUEST, ("x-token", "a")])
    server.http2.receive(client.data_to_send())
    server.http2.reset(server.http2.streams[1], ErrorCode.CANCEL)
    client.send_headers(1, [("x-trailer", "b")], end_stream=True)
    client.send_headers(3, [*REQUEST, ("x-token", "a"), ("x-trailer", "b")])
    server.http2.receive(client.data_to_send())
    assert server.told == [("request", 1), ("request", 3)]


def test_too_many_streams_are_refused_until_one_ends(monkeypatch):
    monkeypatch.setattr(http2, "MAX_STREAMS", 2)
    server = Server()
    frames = server.answer(headers_frame(1), headers_frame(3), headers_frame(5))
    assert frames == [reset(5, ErrorCode.REFUSED_STREAM)]
    server.http2.reset(server.http2.streams[1], ErrorCode.CANCEL)
    assert server.answer(headers_frame(7)) == [reset(1, ErrorCode.CANCEL)]
    assert server.told == [("request", 1), ("request", 3), ("request", 7)]


def test_the_last_stream_of_a_connection_is_told_once_and_for_all():
    server = Server()
    server.stream(3)
    server.http2.go_away(ErrorCode.NO_ERROR)
    server.stream(9)
    server.http2.go_away(ErrorCode.PROTOCOL_ERROR)
    payloads = [payload for kind, _, _, payload in frames_in(server.sent()) if kind == Kind.GOAWAY]
    assert payloads == [NUMBER.pack(3) + NUMBER.pack(code) for code in (0, 1)]


def test_pings_are_answered_and_answers_are_not():
    server = Server()
    ping = frame(Kind.PING, 0, 0, b"12345678")
    assert server.answer(ping, frame(Kind.PING, ACK, 0, bytes(8))) == [
        (Kind.PING, ACK, 0, b"12345678")
    ]
    assert server.answer(settings(), frame(Kind.SETTINGS, ACK, 0, b"")) == [
        (Kind.SETTINGS, ACK, 0, b"")
    ]


def test_frames_that_mean_nothing_here_are_ignored():
    server = Server()
    goaway = frame(Kind.GOAWAY, 0, 0, bytes(8))
    priority = frame(2, 0, 7, bytes(5))  # type: ignore[arg-type]
    unknown = frame(0xFA, 0xFF, 99, b"?")  # type: ignore[arg-type]
    assert server.answer(goaway, priority, unknown, settings((0xFFFF, 1))) == [
        (Kind.SETTINGS, ACK, 0, b"")
    ]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(Kind.PING, 0, 0, b"7 bytes"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(Kind.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.RST_STREAM, 0, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frame(Kind.RST_STREAM, 0, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.WINDOW_UPDATE, 0, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (room_for(3, 1), ErrorCode.PROTOCOL_ERROR),
        (room_for(0, 0), ErrorCode.PROTOCOL_ERROR),
        (room_for(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(Kind.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(Kind.SETTINGS, ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(Kind.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (settings((INITIAL_WINDOW_SIZE, 1 << 31)), ErrorCode.FLOW_CONTROL_ERROR),
        (settings((MAX_FRAME_SIZE, 16_383)), ErrorCode.PROTOCOL_ERROR),
        (settings((MAX_FRAME_SIZE, 1 << 24)), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (data_frame(0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (data_frame(3, b"x"), ErrorCode.PROTOCOL_ERROR),
        (headers_frame(0), ErrorCode.PROTOCOL_ERROR),
        (headers_frame(2), ErrorCode.PROTOCOL_ERROR),
        (frame(Kind.HEADERS, END_HEADERS, 3, b"\xff" * 20), ErrorCode.COMPRESSION_ERROR),
        (headers_frame(3, headers=[("x", "y" * 40_000)]), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(data, code):
    assert refusal(data) == code


def test_headers_that_grow_when_decompressed_are_refused():
    # An entry of 3 kB in the table, named 20 times by one byte each.
    entry = b"\x40\x01x\x7f\xb9\x16" + b"y" * 3000
    bomb = frame(Kind.HEADERS, END_HEADERS, 3, entry + b"\xbe" * 20)
    assert refusal(bomb) == ErrorCode.ENHANCE_YOUR_CALM
