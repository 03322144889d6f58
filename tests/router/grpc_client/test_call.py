"""A call whose transport is the test's: what is written when, and when a server counts as gone."""

from __future__ import annotations

import asyncio

import pytest

from core.http2.frames import ACK, PREFACE, Kind, frame
from router.grpc_client.call import Call
from router.grpc_client.status import CallFailed, request_headers
from tests.core.http2.wire import INITIAL_WINDOW_SIZE, frames_in, message, settings
from tests.router.grpc_client.peers import BEGINNING, data_frame, headers_frame, trailers


class Transport:
    """Keeps what is written. It is closed when the test says so, or aborted."""

    def __init__(self):
        self.written = b""
        self.is_closing = False
        self.is_aborted = False

    def write(self, data):
        self.written += data

    def close(self):
        self.is_closing = True

    def abort(self):
        self.is_aborted = True

    def frames(self) -> list:
        """Since the last time."""
        data, self.written = self.written, b""
        return [(kind, payload) for kind, _, _, payload in frames_in(data)]


@pytest.fixture
async def connected():
    """A call and its transport, the beginning behind them."""
    call = Call(request_headers("/test.Probe/Chat", "test", is_encrypted=False))
    transport = Transport()
    call.connection_made(transport)
    transport.written = transport.written.removeprefix(PREFACE)
    kinds = [kind for kind, _ in transport.frames()]
    assert kinds == [Kind.SETTINGS, Kind.WINDOW_UPDATE, Kind.HEADERS]
    call.data_received(BEGINNING)
    assert transport.frames() == [(Kind.SETTINGS, b"")]
    yield call, transport
    call.connection_lost(None)


async def test_messages_go_out_at_once(connected):
    call, transport = connected
    call.send(b"a")
    call.send(b"bc")
    assert transport.frames() == [(Kind.DATA, message(b"a")), (Kind.DATA, message(b"bc"))]


async def test_messages_wait_while_the_system_takes_no_more(connected):
    call, transport = connected
    call.pause_writing()
    call.send(b"a")
    assert transport.frames() == []
    call.resume_writing()
    assert transport.frames() == [(Kind.DATA, message(b"a"))]


async def test_messages_that_wait_are_dropped_with_the_call(connected):
    call, transport = connected
    call.data_received(settings((INITIAL_WINDOW_SIZE, 0)))
    call.send(b"a")
    transport.frames()
    assert call._held
    call.data_received(trailers(("grpc-status", "14")))
    assert not call._held
    call.data_received(settings((INITIAL_WINDOW_SIZE, 100)))
    call.send(b"b")
    assert transport.frames() == []


async def test_messages_can_be_read_when_the_call_is_over(connected):
    call, _ = connected
    call.data_received(headers_frame() + data_frame(message(b"a") + message(b"b")))
    call.connection_lost(OSError("cable cut"))
    assert [await call.read(5), await call.read(5)] == [b"a", b"b"]
    for _ in range(2):
        with pytest.raises(CallFailed, match="UNAVAILABLE: the connection was lost; cable cut"):
            await call.read(5)


async def test_a_reader_may_try_again_after_silence(connected):
    call, _ = connected
    with pytest.raises(TimeoutError):
        await call.read(0)
    call.data_received(headers_frame() + data_frame(message(b"a")))
    assert await call.read(0) == b"a"


async def test_the_silence_before_a_message_does_not_count_behind_it(connected):
    call, _ = connected
    reading = asyncio.create_task(call.read(0.3))
    await asyncio.sleep(0)
    call.data_received(headers_frame() + data_frame(message(b"a")))
    assert await reading == b"a"
    again = asyncio.create_task(call.read(1000))
    await asyncio.sleep(0.5)
    call.data_received(data_frame(message(b"b")))
    assert await again == b"b"


async def test_a_cancelled_reader_leaves_nothing(connected):
    call, _ = connected
    reading = asyncio.create_task(call.read(1000))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert (reading.cancelled(), call._news) == (True, None)
    call.data_received(headers_frame() + data_frame(message(b"a")))
    assert await call.read(0) == b"a"


async def test_a_server_that_says_something_is_not_asked(connected):
    call, transport = connected
    call.keep_alive()
    call.data_received(frame(Kind.PING, ACK, 0, bytes(8)))
    call._look_for_life(is_asked=False)
    assert transport.frames() == []


async def test_a_server_that_answers_stays(connected):
    call, transport = connected
    call.keep_alive()
    call._look_for_life(is_asked=False)
    assert transport.frames() == [(Kind.PING, bytes(8))]
    call.data_received(frame(Kind.PING, ACK, 0, bytes(8)))
    call._look_for_life(is_asked=True)
    call.data_received(headers_frame() + trailers())
    assert await call.read(5) is None


async def test_a_server_that_does_not_answer_is_given_up(connected):
    call, _ = connected
    call.keep_alive()
    call._look_for_life(is_asked=False)
    call._look_for_life(is_asked=True)
    with pytest.raises(CallFailed, match="UNAVAILABLE: the server does not answer pings"):
        await call.read(5)


async def test_a_call_that_is_over_has_no_timer(connected):
    call, _ = connected
    call.keep_alive()
    call.data_received(headers_frame() + trailers())
    assert call._timer.cancelled()
    call._timer = None
    call.keep_alive()
    assert call._timer is None


async def test_a_call_may_be_aborted_before_and_after_it_is_connected(connected):
    late = Call(request_headers("/test.Probe/Chat", "test", is_encrypted=False))
    late.abort()
    for call, transport in (connected, (late, Transport())):
        if call is late:
            call.connection_made(transport)
        call.abort()
        assert (transport.written, transport.is_aborted) == (b"", True)
        call.connection_lost(None)
        with pytest.raises(CallFailed, match="CANCELLED: the call was closed"):
            await call.read(5)


async def test_closing_waits_only_a_moment_for_a_server_that_does_not_let_it(connected):
    call, transport = connected
    await call.close()
    assert [kind for kind, _ in transport.frames()] == [Kind.RST_STREAM]
    assert (transport.is_closing, transport.is_aborted) == (True, True)


async def test_closing_can_be_cancelled(connected):
    call, transport = connected
    closing = asyncio.create_task(call.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert transport.is_aborted
