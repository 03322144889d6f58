"""Whatever bytes come, and however they are cut: calls, or a connection that ends."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from core.http2.frames import END_HEADERS, END_STREAM, NUMBER, PREFACE, Kind, frame
from router.grpc_server.connection import Connection, Shared
from router.grpc_server.method import Method
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, data_frame, frames_in, message, room_for
from tests.core.http2.wire import settings as settings_frame
from tests.router.grpc_server.conftest import Probe
from tests.router.grpc_server.peers import REQUEST, h2_client, headers_frame, request_to
from tests.router.grpc_server.test_connection import Transport

PADDED = 0x8


def frames_of_h2() -> list[bytes]:
    """Calls with headers in the table, as the h2 library sends them."""
    client, pieces = h2_client(), []
    for stream_id in (1, 3):
        client.send_headers(stream_id, [*REQUEST, ("x-token", "abc"), ("a-bin", "AAAA")])
        client.send_data(stream_id, message(b"hello"), end_stream=True, pad_length=stream_id)
        client.ping(b"12345678")
    client.send_headers(5, request_to("Chat", ("grpc-timeout", "9S"), ("grpc-encoding", "gzip")))
    client.send_data(5, message(b"to be continued") + b"\1")
    client.reset_stream(5)
    data = client.data_to_send()
    pieces = [frame(*each) for each in frames_in(data.removeprefix(PREFACE))]
    return [PREFACE + pieces[0], *pieces[1:]]


FRAMES = [
    *frames_of_h2(),
    settings_frame((INITIAL_WINDOW_SIZE, 20)),
    headers_frame(7, headers=request_to("Chat")),
    data_frame(7, message(b"first") + message(b"second")[:7], 0),
    frame(Kind.DATA, PADDED | END_STREAM, 7, b"\2" + message(b"second")[7:] + b"\0\0"),
    headers_frame(9, END_STREAM, request_to("Nothing")),
    headers_frame(11, headers=request_to("Count")),
    data_frame(11, message(b"10")),
    frame(Kind.HEADERS, 0, 13, headers_frame(13)[9:30]),
    frame(Kind.CONTINUATION, END_HEADERS, 13, headers_frame(13)[30:]),
    data_frame(13, message(b"x"), 0),
    headers_frame(13, END_STREAM),
    room_for(7, 1),
    room_for(0, 1000),
    frame(Kind.RST_STREAM, 0, 11, NUMBER.pack(8)),
    frame(Kind.GOAWAY, 0, 0, bytes(8)),
]
CUT_OFF = headers_frame(15)[:-20]


async def outcome(pieces: list[bytes]) -> list:
    """What a client that sends `pieces` is sent. Nothing may fail, nor be left in the end."""
    failures = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    shared = Shared()
    for name, handler in Probe().handlers().items():
        path = f"/test.Probe/{name}"
        shared.methods[path] = Method.of(path, handler)
    connection, transport = Connection(shared), Transport()
    connection.connection_made(transport)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (shared.tasks, shared.connections, failures) == (set(), set(), [])
    return frames_in(b"".join(transport.writes))


def data_sent(frames: list) -> dict[int, bytes]:
    """Of each stream."""
    found: dict[int, bytes] = {}
    for kind, _, stream_id, payload in frames:
        if kind == Kind.DATA:
            found[stream_id] = found.get(stream_id, b"") + payload
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(ends)]


@given(st.lists(st.integers(min_value=0), max_size=20))
@settings(max_examples=100, deadline=None)
def test_calls_are_the_same_however_the_bytes_are_cut(places):
    sent = data_sent(asyncio.run(outcome(cut(b"".join(FRAMES), places))))
    assert (sent[1], sent[3], sent[13]) == (message(b"re: hello"),) * 2 + (message(b"re: x"),)
    assert sent[7] == message(b"re: first") + message(b"re: second")[:7]


@given(
    st.lists(st.sampled_from([*FRAMES[1:], CUT_OFF]), max_size=30),
    st.lists(st.tuples(st.integers(min_value=0), st.integers(0, 255)), max_size=6),
    st.integers(min_value=0),
)
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_answered_or_end_the_connection(frames, changes, place):
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
def test_frames_without_sense_are_answered_or_end_the_connection(made):
    frames = [frame(kind, flags, 1, payload) for kind, flags, payload in made]
    asyncio.run(outcome([FRAMES[0], headers_frame(1), *frames]))
