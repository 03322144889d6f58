"""Messages in a stream of bytes."""

from __future__ import annotations

import gzip
import zlib

import grpc
import pytest

from core.http2.messages import HeldMessages, MessageReader, Refused

MAX_BYTES = 1000


def packed(data: bytes, *, is_compressed=False) -> bytes:
    return bytes([is_compressed]) + len(data).to_bytes(4, "big") + data


def reader(data: bytes, encoding="identity") -> MessageReader:
    made = MessageReader(encoding, MAX_BYTES)
    made.feed(data)
    return made


def take_compressed(data: bytes, encoding: str) -> bytes:
    return reader(packed(data, is_compressed=True), encoding).take()


def test_a_message_is_there_when_its_last_byte_is():
    data = packed(b"hello")
    read = MessageReader("identity", MAX_BYTES)
    for byte in data[:-1]:
        read.feed(bytes([byte]))
        assert not read.has_message()
    read.feed(data[-1:])
    assert (read.has_message(), read.has_more(), read.take()) == (True, False, b"hello")
    assert read.is_empty


def test_messages_are_taken_in_the_order_in_which_they_came():
    read = reader(packed(b"a") + packed(b"") + packed(b"c") + b"\0\0")
    assert read.has_more()
    assert [read.take(), read.take(), read.take()] == [b"a", b"", b"c"]
    assert (read.has_message(), read.is_empty) == (False, False)


def test_a_message_that_is_too_long_is_refused_by_its_length_alone():
    longest = packed(bytes(MAX_BYTES))
    assert len(reader(longest).take()) == MAX_BYTES
    with pytest.raises(Refused, match="1001 bytes; at most 1000") as caught:
        reader(packed(bytes(MAX_BYTES + 1))[:5])
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_compressed_messages_stand_among_others(encoding, compress):
    read = reader(packed(compress(b"x" * 900), is_compressed=True) + packed(b"plain"), encoding)
    assert [read.take(), read.take()] == [b"x" * 900, b"plain"]


def test_a_bomb_is_not_inflated():
    bomb = gzip.compress(bytes(100 * MAX_BYTES))
    assert len(bomb) < MAX_BYTES
    with pytest.raises(Refused, match="1001 bytes; at most 1000") as caught:
        take_compressed(bomb, "gzip")
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("data", "encoding", "message"),
    [
        (b"x", "identity", "no grpc-encoding says how"),
        (b"no gzip", "gzip", "incorrect header check"),
        (gzip.compress(b"x")[:-1], "gzip", "does not end where it should"),
        (gzip.compress(b"x") * 2, "gzip", "does not end where it should"),
        (b"", "deflate", "does not end where it should"),
    ],
)
def test_what_cannot_be_inflated_is_refused(data, encoding, message):
    with pytest.raises(Refused, match=message) as caught:
        take_compressed(data, encoding)
    assert caught.value.code is grpc.StatusCode.INTERNAL


def test_what_is_held_leaves_in_order_as_there_is_room():
    held, sent, room = HeldMessages(), bytearray(), [4, 0, 3, 100]

    def send(message: bytes, start: int) -> int:
        piece = message[start : start + room.pop(0)]
        sent.extend(piece)
        return len(piece)

    held.add(b"abcdef")
    held.add(b"xyz")
    progress = []
    for _ in range(4):
        had_room = held.send_piece(send)
        progress.append((bytes(sent), had_room, held.is_mid_message))
    assert progress == [
        (b"abcd", True, True),
        (b"abcd", False, True),
        (b"abcdef", True, False),
        (b"abcdefxyz", True, False),
    ]
    assert not held


def test_what_was_begun_remains_begun_when_the_rest_is_forgotten():
    held = HeldMessages()
    held.add(b"abc")
    held.send_piece(lambda message, start: 1)
    held.clear()
    assert (bool(held), held.is_mid_message) == (False, True)
