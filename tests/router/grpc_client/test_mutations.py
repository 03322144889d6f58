"""Whatever bytes come, and however they are cut: messages and one end."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from core.http2.frames import END_HEADERS, END_STREAM, Kind, frame
from router.grpc_client.call import Call
from router.grpc_client.status import CallFailed, request_headers
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, message, room_for
from tests.core.http2.wire import settings as settings_frame
from tests.router.grpc_client.conftest import read_all
from tests.router.grpc_client.peers import ANSWER, BEGINNING, data_frame, headers_frame
from tests.router.grpc_client.test_call import Transport

PADDED = 0x8
_ENCODER = hpack.Encoder()
BLOCK = _ENCODER.encode([*ANSWER, ("x-token", "abc")])
MESSAGES = [b"first", b"", b"third" * 40, b"fourth"]
FRAMES = [
    BEGINNING,
    settings_frame((INITIAL_WINDOW_SIZE, 20)),
    headers_frame([(":status", "100")]),
    frame(Kind.HEADERS, 0, 1, BLOCK[:7]),
    frame(Kind.CONTINUATION, END_HEADERS, 1, BLOCK[7:]),
    data_frame(message(MESSAGES[0]) + message(MESSAGES[1])),
    frame(Kind.PING, 0, 0, b"12345678"),
    data_frame(message(MESSAGES[2])[:100]),
    room_for(1, 3),
    frame(Kind.DATA, PADDED, 1, b"\2" + message(MESSAGES[2])[100:] + b"\0\0"),
    frame(Kind.GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4) + b"soon"),
    data_frame(message(MESSAGES[3])),
    room_for(0, 1000),
    frame(
        Kind.HEADERS,
        END_HEADERS | END_STREAM,
        1,
        _ENCODER.encode([("grpc-status", "5"), ("grpc-message", "none left"), ("x-token", "abc")]),
    ),
    frame(Kind.RST_STREAM, 0, 1, bytes(4)),
]


async def outcome(pieces: list[bytes]) -> tuple[list[bytes], str, bytes]:
    """Messages, the end, and what the server is sent of one call. Nothing may fail."""
    failures = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    call = Call(request_headers("/test.Probe/Chat", "test", is_encrypted=False))
    transport = Transport()
    call.connection_made(transport)
    call.keep_alive()
    call.send(b"x" * 30)
    reading = loop.create_task(read_all(call))
    for piece in pieces:
        call.data_received(piece)
        await asyncio.sleep(0)
    call.connection_lost(None)
    messages, end = await reading
    try:
        await call.read(0)
    except CallFailed as failure:
        assert str(failure) == end
    assert (failures, call._timer.cancelled(), call._news) == ([], True, None)
    return messages, end, transport.written


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.integers(min_value=0), max_size=20))
@settings(max_examples=150, deadline=None)
def test_a_call_is_the_same_however_the_bytes_are_cut(places):
    data = b"".join(FRAMES)
    messages, end, sent = asyncio.run(outcome(cut(data, places)))
    assert (messages, end) == (MESSAGES, "NOT_FOUND: none left")
    assert sent == asyncio.run(outcome(FRAMES))[2]


@given(
    st.lists(st.sampled_from(FRAMES[1:]), max_size=30),
    st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), max_size=6),
    st.integers(min_value=0),
)
@settings(max_examples=400, deadline=None)
def test_any_bytes_have_one_end(frames, changes, place):
    data = bytearray(FRAMES[0] + b"".join(frames))
    for where, value in changes:
        data[where % len(data)] = value
    asyncio.run(outcome(cut(bytes(data), [place])))


@given(
    st.lists(
        st.tuples(st.sampled_from(Kind), st.integers(0, 255), st.binary(max_size=60)), max_size=10
    )
)
@settings(max_examples=200, deadline=None)
def test_frames_without_sense_have_one_end(made):
    frames = [frame(kind, flags, 1, payload) for kind, flags, payload in made]
    asyncio.run(outcome([BEGINNING, headers_frame(), *frames]))
