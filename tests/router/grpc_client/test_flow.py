"""What a call takes from a server that is faster than its reader, and sends to one with no room."""

from __future__ import annotations

import asyncio

from core.http2.base import STREAM_WINDOW
from core.http2.frames import NUMBER, ErrorCode, Kind, frame
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, message, room_for, settings
from tests.router.grpc_client.conftest import PATIENCE_S, called, raw_server, read_all
from tests.router.grpc_client.peers import BEGINNING, data_frame, headers_frame, trailers

PING, PONG = frame(Kind.PING, 0, 0, b"12345678"), (Kind.PING, 1, 0, b"12345678")
QUARTER = message(bytes(STREAM_WINDOW // 4 - 5))


async def test_a_message_is_sent_in_pieces_as_the_server_makes_room():
    sent = [b"1" * 100_000, b"2" * 50_000, b"", b"3"]
    received = bytearray()

    async def take(peer):
        peer.send(BEGINNING)
        while len(received) < sum(map(len, sent)) + 5 * len(sent):
            data = (await peer.until(Kind.DATA))[3]
            received.extend(data)
            peer.send(room_for(0, len(data)), room_for(1, len(data)))
        peer.send(headers_frame(), trailers())

    async with raw_server(take) as address, called(address) as call:
        for each in sent:
            call.send(each)
        assert await read_all(call) == ([], "OK")
    assert received == b"".join(map(message, sent))


async def test_a_window_of_nothing_holds_messages_until_it_opens():
    taken = []

    async def take(peer):
        peer.send(settings((INITIAL_WINDOW_SIZE, 0)), headers_frame())
        peer.send(data_frame(message(b"go")))
        peer.send(PING)
        await peer.until(Kind.PING)
        peer.send(PING)
        taken.append(await peer.next())
        while taken[-1][0] != Kind.PING:
            taken.append(await peer.next())
        peer.send(room_for(1, 4))
        taken.append(await peer.next())
        peer.send(room_for(1, 100))
        taken.append(await peer.next())
        peer.send(trailers())

    async with raw_server(take) as address, called(address) as call:
        assert await call.read(PATIENCE_S) == b"go"
        call.send(b"abc")
        assert await read_all(call) == ([], "OK")
    assert taken == [
        PONG,
        (Kind.DATA, 0, 1, message(b"abc")[:4]),
        (Kind.DATA, 0, 1, message(b"abc")[4:]),
    ]


async def test_room_comes_back_when_messages_have_been_dealt_with():
    """A reader that is slow bounds what waits for it."""
    updates = []
    is_full = asyncio.Event()

    async def fill(peer):
        await peer.until(Kind.DATA)
        peer.send(BEGINNING, headers_frame(), data_frame(QUARTER) * 4, PING)
        while (received := await peer.next()) != PONG:
            updates.append(received)
        is_full.set()
        updates.append(await peer.until(Kind.WINDOW_UPDATE))
        peer.send(data_frame(QUARTER) * 4, trailers())

    async with raw_server(fill) as address, called(address) as call:
        call.send(b"x")
        for _ in range(4):
            assert len(await call.read(PATIENCE_S)) == len(QUARTER) - 5
            await is_full.wait()
        assert [kind for kind, *_ in updates] == [Kind.SETTINGS]
        messages, end = await read_all(call)
    assert updates[1:] == [(Kind.WINDOW_UPDATE, 0, 1, NUMBER.pack(STREAM_WINDOW))]
    assert (len(messages), end) == (4, "OK")


async def test_a_message_may_be_larger_than_the_window():
    sent = message(b"x" * (4 * STREAM_WINDOW))

    async def answer(peer):
        peer.send(BEGINNING, headers_frame())
        window = STREAM_WINDOW
        for start in range(0, len(sent), 1 << 18):
            piece = sent[start : start + (1 << 18)]
            while window < len(piece):
                _, _, stream_id, payload = await peer.until(Kind.WINDOW_UPDATE)
                window += NUMBER.unpack(payload)[0] if stream_id == 1 else 0
            window -= len(piece)
            peer.send(data_frame(piece))
        peer.send(trailers())

    async with raw_server(answer) as address, called(address) as call:
        assert await read_all(call) == ([sent[5:]], "OK")


async def test_a_call_that_is_closed_in_the_middle_of_a_message_is_reset():
    codes = []

    async def hold(peer):
        peer.send(BEGINNING, headers_frame(), data_frame(message(b"go")))
        codes.append(await peer.reset_code())
        await peer.ends()

    async with raw_server(hold) as address:
        async with called(address) as call:
            call.send(bytes(1 << 20))
            await call.read(PATIENCE_S)
        call.send(b"late")
    assert codes == [ErrorCode.CANCEL]


async def test_others_have_their_turn_while_messages_are_there():
    num_turns, reading = 0, asyncio.Event()

    async def count_turns():
        nonlocal num_turns
        while not reading.is_set():
            num_turns += 1
            await asyncio.sleep(0)

    async def answer(peer):
        peer.send(BEGINNING, headers_frame(), data_frame(message(b"x") * 1000), trailers())

    async with raw_server(answer) as address, called(address) as call:
        assert await call.read(PATIENCE_S) == b"x"
        counting = asyncio.create_task(count_turns())
        messages, end = await read_all(call)
        reading.set()
        await counting
    assert (len(messages), end) == (999, "OK")
    assert num_turns > 900
