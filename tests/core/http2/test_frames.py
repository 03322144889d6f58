"""Bytes that came, cut into frames."""

from __future__ import annotations

import pytest

from core.http2.frames import (
    END_HEADERS,
    END_STREAM,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    PREFACE,
    ErrorCode,
    FrameReader,
    Http2Error,
    Kind,
    frame,
)

BEGINNING = PREFACE + frame(Kind.SETTINGS, 0, 0, b"")
PADDED, PRIORITY = 0x8, 0x20


def reader() -> FrameReader:
    """One that has the beginning behind it."""
    made = FrameReader(PREFACE)
    assert [received.kind for received in made.feed(BEGINNING)] == [Kind.SETTINGS]
    return made


def one(data: bytes):
    (received,) = reader().feed(data)
    return received


def refusal(data: bytes, read: FrameReader | None = None) -> ErrorCode:
    with pytest.raises(Http2Error) as caught:
        list((read or reader()).feed(data))
    return caught.value.code


def test_frames_are_the_same_however_their_bytes_are_cut():
    data = BEGINNING + frame(Kind.DATA, END_STREAM, 7, b"abc") + frame(Kind.PING, 0, 0, bytes(8))
    read = FrameReader(PREFACE)
    received = [each for byte in data for each in read.feed(bytes([byte]))]
    assert received == list(FrameReader(PREFACE).feed(data))
    assert received[1] == (Kind.DATA, END_STREAM, 7, b"abc", 3)


def test_padding_is_taken_away_and_counts():
    received = one(frame(Kind.DATA, PADDED, 1, b"\x03abc\0\0\0"))
    assert (received.payload, received.num_bytes) == (b"abc", 7)
    assert one(frame(Kind.DATA, PADDED, 1, b"\x00")).payload == b""


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\x05abcd"])
def test_more_padding_than_payload_is_an_error(payload):
    assert refusal(frame(Kind.DATA, PADDED, 1, payload)) == ErrorCode.PROTOCOL_ERROR
    padded_headers = frame(Kind.HEADERS, PADDED | END_HEADERS, 1, payload)
    assert refusal(padded_headers) == ErrorCode.PROTOCOL_ERROR


def test_priority_is_taken_out_of_headers():
    payload = b"\x02" + bytes(5) + b"block" + bytes(2)
    received = one(frame(Kind.HEADERS, PADDED | PRIORITY | END_HEADERS, 1, payload))
    assert received.payload == b"block"
    short = frame(Kind.HEADERS, PRIORITY | END_HEADERS, 1, bytes(4))
    assert refusal(short) == ErrorCode.FRAME_SIZE_ERROR


def test_headers_of_several_frames_are_one():
    pieces = (
        frame(Kind.HEADERS, END_STREAM, 3, b"a"),
        frame(Kind.CONTINUATION, 0, 3, b"b"),
        frame(Kind.CONTINUATION, END_HEADERS, 3, b"c"),
    )
    received = one(b"".join(pieces))
    assert (received.kind, received.flags, received.payload) == (Kind.HEADERS, END_STREAM, b"abc")


@pytest.mark.parametrize(
    "frames",
    [
        (frame(Kind.CONTINUATION, END_HEADERS, 1, b"a"),),
        (frame(Kind.HEADERS, 0, 1, b"a"), frame(Kind.CONTINUATION, END_HEADERS, 3, b"b")),
        (frame(Kind.HEADERS, 0, 1, b"a"), frame(Kind.PING, 0, 0, bytes(8))),
    ],
    ids=["no headers before", "another stream", "something between"],
)
def test_headers_go_on_at_once_or_not_at_all(frames):
    assert refusal(b"".join(frames)) == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("piece", [b"", b"x" * 100])
def test_headers_without_an_end_are_cut_off(piece):
    read = reader()
    assert list(read.feed(frame(Kind.HEADERS, 0, 1, b"a"))) == []
    frames = frame(Kind.CONTINUATION, 0, 1, piece) * (MAX_HEADER_BYTES // 9 + 1)
    assert refusal(frames, read) == ErrorCode.ENHANCE_YOUR_CALM


def test_a_frame_that_is_too_large_is_refused_by_its_length():
    assert len(one(frame(Kind.DATA, 0, 1, bytes(MAX_FRAME_BYTES))).payload) == MAX_FRAME_BYTES
    too_large = frame(Kind.DATA, 0, 1, bytes(MAX_FRAME_BYTES + 1))[:9]
    assert refusal(too_large) == ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", PREFACE[:-1] + b"x", PREFACE + frame(Kind.PING, 0, 0, bytes(8))],
    ids=["HTTP/1", "almost", "no settings"],
)
def test_a_connection_begins_with_the_preface_and_settings(data):
    assert refusal(data, FrameReader(PREFACE)) == ErrorCode.PROTOCOL_ERROR


def test_the_reserved_bit_of_a_stream_is_ignored():
    assert one(frame(Kind.DATA, 0, 1 | 1 << 31, b"")).stream_id == 1


def test_frames_before_an_error_are_read():
    read, received = reader(), []
    with pytest.raises(Http2Error):
        received.extend(read.feed(frame(Kind.PING, 0, 0, bytes(8))))
        for each in read.feed(frame(Kind.DATA, 0, 1, b"a") + frame(Kind.CONTINUATION, 0, 1, b"")):
            received.append(each.kind)
    assert [received[0].kind, received[1]] == [Kind.PING, Kind.DATA]
