"""Windows of HTTP/2, in both directions, at both ends of a connection."""

from __future__ import annotations

from itertools import count

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
from tests.router.grpc_client.peers import Client
from tests.router.grpc_server.peers import Server

PADDED = 0x8


@pytest.fixture(params=[Server, Client])
def end(request):
    return request.param()


def test_room_is_the_least_of_three(end):
    stream = end.stream()
    assert end.http2.room(stream) == 16_384
    end.http2.receive(settings((MAX_FRAME_SIZE, 1 << 21), (INITIAL_WINDOW_SIZE, 100)))
    assert end.http2.room(stream) == 100
    end.http2.receive(room_for(1, 1 << 20))
    assert end.http2.room(stream) == 65_535
    end.http2.receive(room_for(0, 1 << 20))
    assert end.http2.room(stream) == 100 + (1 << 20)


def test_a_smaller_initial_window_may_make_windows_negative(end):
    stream = end.stream()
    end.http2.send_data(stream, b"x" * 1000)
    end.http2.receive(settings((INITIAL_WINDOW_SIZE, 100)))
    assert end.http2.room(stream) == -900
    end.http2.receive(room_for(1, 901))
    assert (end.http2.room(stream), end.num_rooms) == (1, 3)


def test_windows_come_back_for_data_that_is_consumed(end):
    stream = end.stream()
    frames = []
    for _ in range(40 * STREAM_WINDOW // (1 << 18)):
        frames += end.answer(data_frame(1, bytes(1 << 18), 0))
        end.http2.consumed(stream, 1 << 18)
    frames += frames_in(end.sent())
    updates = [(stream_id, NUMBER.unpack(payload)[0]) for _, _, stream_id, payload in frames]
    assert updates.count((1, STREAM_WINDOW // 2)) == 80
    assert updates.count((0, CONNECTION_WINDOW // 2)) == len(updates) - 80 == 5


def test_windows_come_back_for_data_of_streams_that_have_ended(end):
    end.http2.reset(end.stream(), ErrorCode.CANCEL)
    end.sent()
    frames = end.answer(data_frame(1, bytes(1 << 18), 0) * 32)
    assert frames == [(Kind.WINDOW_UPDATE, 0, 0, NUMBER.pack(8 << 20))]


def test_padding_comes_back_at_once(end):
    end.stream()
    end.told.clear()
    padded = frame(Kind.DATA, PADDED, 1, b"\xff" + bytes(255))
    frames = end.answer(padded * (STREAM_WINDOW // 2 // 256))
    assert frames == [(Kind.WINDOW_UPDATE, 0, 1, NUMBER.pack(STREAM_WINDOW // 2))]
    assert end.told == []


def test_a_stream_that_gets_more_than_its_window_is_reset(end):
    end.stream()
    frames = end.answer(data_frame(1, bytes(1 << 18), 0) * 4, data_frame(1, b"x"))
    assert frames == [reset(1, ErrorCode.FLOW_CONTROL_ERROR)]
    assert end.told[-1][:2] == ("reset", 1)


def test_a_peer_that_ignores_the_connections_window_is_cut_off(end):
    numbers = count()
    with pytest.raises(Http2Error, match="FLOW_CONTROL_ERROR"):
        for number in numbers:
            stream = end.stream(2 * number + 1) if isinstance(end, Server) else end.stream()
            end.http2.receive(data_frame(stream.id, bytes(1 << 18), 0) * 4)
    assert end.http2.last_stream_id == 33


@pytest.mark.parametrize(
    ("increment", "code"),
    [(0, ErrorCode.PROTOCOL_ERROR), ((1 << 31) - 1, ErrorCode.FLOW_CONTROL_ERROR)],
)
def test_a_wrong_increment_of_a_streams_window_resets_the_stream(end, increment, code):
    end.stream()
    assert end.answer(room_for(1, increment)) == [reset(1, code)]
    assert end.told[-1][:2] == ("reset", 1)
