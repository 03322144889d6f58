"""Windows of HTTP/2, in both directions."""

from __future__ import annotations

import pytest

from core.http2.base import CONNECTION_WINDOW, STREAM_WINDOW
from core.http2.frames import NUMBER, ErrorCode, Http2Error, Kind, frame
from tests.core.http2.wire import (
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    data_frame,
    frames_in,
    reset,
    room_for,
    settings,
)
from tests.router.grpc_server.peers import Server, headers_frame

PADDED = 0x8


def test_room_is_the_least_of_three():
    server = Server()
    stream = server.stream()
    assert server.http2.room(stream) == 16_384
    server.http2.receive(settings((MAX_FRAME_SIZE, 1 << 21), (INITIAL_WINDOW_SIZE, 100)))
    assert server.http2.room(stream) == 100
    server.http2.receive(room_for(1, 1 << 20))
    assert server.http2.room(stream) == 65_535
    server.http2.receive(room_for(0, 1 << 20))
    assert server.http2.room(stream) == 100 + (1 << 20)


def test_a_smaller_initial_window_may_make_windows_negative():
    server = Server()
    stream = server.stream()
    server.http2.send_data(stream, b"x" * 1000)
    server.http2.receive(settings((INITIAL_WINDOW_SIZE, 100)))
    assert server.http2.room(stream) == -900
    server.http2.receive(room_for(1, 901))
    assert (server.http2.room(stream), server.num_rooms) == (1, 3)


def test_windows_come_back_for_data_that_is_consumed():
    server = Server()
    stream = server.stream()
    frames = []
    for _ in range(40 * STREAM_WINDOW // (1 << 18)):
        frames += server.answer(data_frame(1, bytes(1 << 18), 0))
        server.http2.consumed(stream, 1 << 18)
    frames += frames_in(server.sent())
    updates = [(stream_id, NUMBER.unpack(payload)[0]) for _, _, stream_id, payload in frames]
    assert updates.count((1, STREAM_WINDOW // 2)) == 80
    assert updates.count((0, CONNECTION_WINDOW // 2)) == len(updates) - 80 == 5


def test_windows_come_back_for_data_of_streams_that_have_ended():
    server = Server()
    server.http2.reset(server.stream(), ErrorCode.CANCEL)
    server.sent()
    frames = server.answer(data_frame(1, bytes(1 << 18), 0) * 32)
    assert frames == [(Kind.WINDOW_UPDATE, 0, 0, NUMBER.pack(8 << 20))]


def test_padding_comes_back_at_once():
    server = Server()
    server.stream()
    padded = frame(Kind.DATA, PADDED, 1, b"\xff" + bytes(255))
    frames = server.answer(padded * (STREAM_WINDOW // 2 // 256))
    assert frames == [(Kind.WINDOW_UPDATE, 0, 1, NUMBER.pack(STREAM_WINDOW // 2))]
    assert server.told == [("request", 1)]


def test_a_stream_that_gets_more_than_its_window_is_reset():
    server = Server()
    server.stream()
    frames = server.answer(data_frame(1, bytes(1 << 18), 0) * 4, data_frame(1, b"x"))
    assert frames == [reset(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_a_client_that_ignores_the_connections_window_is_cut_off():
    server = Server()
    with pytest.raises(Http2Error, match="FLOW_CONTROL_ERROR"):
        for stream_id in range(1, 99, 2):
            server.http2.receive(headers_frame(stream_id))
            server.http2.receive(data_frame(stream_id, bytes(1 << 18), 0) * 4)
    assert server.http2.last_stream_id == 33


@pytest.mark.parametrize(
    ("increment", "code"),
    [(0, ErrorCode.PROTOCOL_ERROR), ((1 << 31) - 1, ErrorCode.FLOW_CONTROL_ERROR)],
)
def test_a_wrong_increment_of_a_streams_window_resets_the_stream(increment, code):
    server = Server()
    server.stream()
    assert server.answer(room_for(1, increment)) == [reset(1, code)]
    assert server.told[-1] == ("reset", 1)
