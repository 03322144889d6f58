"""Calls that end early: cancelled, out of time, left by their clients, or left unread."""

from __future__ import annotations

import asyncio
import gc
import weakref

import grpc
import pytest

from core.errors import InvalidArgument
from core.http2.frames import END_STREAM, NUMBER, ErrorCode, Kind, frame
from tests.core.http2.wire import data_frame, message, room_for
from tests.router.grpc_server.peers import headers_frame, request_to
from tests.router.stack import wait_for

CANCEL = frame(Kind.RST_STREAM, 0, 1, NUMBER.pack(ErrorCode.CANCEL))


def call(method: str, request: bytes, *more: tuple[str, str]) -> bytes:
    """The frames of a call with one message."""
    return headers_frame(1, headers=request_to(method, *more)) + data_frame(1, message(request))


async def is_idle(s) -> None:
    """Returns when no call is left, nor anything of one."""
    await wait_for(lambda: not s.shared.tasks and not s.connection._calls)
    assert s.connection._http2.streams == {}


async def test_a_cancelled_call_ends_its_servicer(serve):
    async with serve() as s:
        held = s.stream("Hold")(b"x")
        assert await held.read() == b"x"
        held.cancel()
        await s.probe.ended.wait()
        await is_idle(s)
        assert await s.unary()(b"y") == b"re: y"


async def test_a_cancelled_call_is_freed_without_the_garbage_collector(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Hold", b"x"))
        await raw.until(Kind.DATA)
        (running,) = map(weakref.ref, s.connection._calls.values())
        gc.disable()
        try:
            raw.send(CANCEL)
            await wait_for(lambda: running() is None)
        finally:
            gc.enable()


async def test_a_client_that_leaves_ends_its_calls(serve):
    async with serve() as s:
        async with s.raw() as raw:
            raw.send(call("Hold", b"x"))
            await raw.until(Kind.DATA)
        await s.probe.ended.wait()
        await wait_for(lambda: not s.shared.connections and not s.shared.tasks)


@pytest.mark.parametrize("method", ["Hold", "Chat"])
async def test_a_call_may_be_cancelled_before_its_request_is_whole(serve, method):
    async with serve() as s, s.raw() as raw:
        begun = headers_frame(1, headers=request_to(method)) + data_frame(1, message(b"x")[:3], 0)
        raw.send(begun, CANCEL, frame(Kind.PING, 0, 0, bytes(8)))
        await raw.until(Kind.PING)
        await is_idle(s)
        assert not s.probe.started.is_set()


async def test_a_call_may_be_cancelled_as_soon_as_it_is_asked(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Hold", b"x"), CANCEL, frame(Kind.PING, 0, 0, bytes(8)))
        await raw.until(Kind.PING)
        await is_idle(s)
        assert not s.probe.started.is_set()


async def test_a_call_may_be_cancelled_while_a_message_waits_for_room(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Hold", bytes(100_000)))
        await wait_for(lambda: s.connection._http2.send_window == 0)
        (running,) = s.connection._calls.values()
        assert running.is_mid_message
        raw.send(CANCEL)
        await s.probe.ended.wait()
        await is_idle(s)


async def test_cancelling_a_generator_closes_it_at_once(serve):
    closed = asyncio.Event()

    async def endless(request, context):
        try:
            while True:
                yield b"x"
        finally:
            closed.set()

    async with serve(Endless=grpc.unary_stream_rpc_method_handler(endless)) as s, s.raw() as raw:
        raw.send(call("Endless", b""))
        await wait_for(lambda: s.connection._http2.send_window < 6)
        raw.send(CANCEL)
        await closed.wait()
        await is_idle(s)


async def test_what_a_servicer_writes_while_it_cleans_up_is_dropped(serve):
    wrote = []

    async def stubborn(request, context):
        await context.write(b"first")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await context.write(b"late")
            wrote.append(context.write_soon(bytes(1 << 20)))

    async with serve(Stubborn=grpc.unary_stream_rpc_method_handler(stubborn)) as s, s.raw() as raw:
        raw.send(call("Stubborn", b""))
        assert (await raw.until(Kind.DATA))[3] == message(b"first")
        raw.send(CANCEL, frame(Kind.PING, 0, 0, bytes(8)))
        await is_idle(s)
        assert (await raw.until(Kind.PING), wrote) == ((Kind.PING, 1, 0, bytes(8)), [True])


async def test_a_call_ends_at_its_clients_deadline_whatever_its_servicer_does(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Hold", b"x", ("grpc-timeout", "1m")))
        assert (await raw.headers())[":status"] == "200"
        assert (await raw.headers())["grpc-status"] == "4"
        await s.probe.ended.wait()
        await is_idle(s)


async def test_a_request_that_does_not_become_whole_ends_at_its_deadline(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, headers=request_to("Echo", ("grpc-timeout", "1m"))))
        assert (await raw.headers())["grpc-status"] == "4"
        assert await raw.reset_code() == ErrorCode.NO_ERROR
        await is_idle(s)


async def test_a_message_of_which_a_part_was_sent_is_reset_at_the_deadline(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Hold", bytes(100_000), ("grpc-timeout", "1m")))
        assert await raw.reset_code() == ErrorCode.CANCEL
        await s.probe.ended.wait()
        await is_idle(s)


async def test_servicers_know_how_much_time_is_left(serve):
    async with serve() as s:
        await s.unary()(b"", timeout=50)
        await s.unary()(b"")
        hurried, endless = s.probe.contexts
        # gRPC rounds deadlines up.
        assert 0 < hurried.time_remaining() < 51
        assert endless.time_remaining() is None
        assert hurried._timer.cancelled(), "a call that is over would be kept until its deadline"


async def test_messages_go_on_where_they_stopped_when_room_comes_in_small_pieces(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(call("Write", b"3 30000"))
        received = b""
        while len(received) < 3 * 30_005:
            _, _, _, data = await raw.until(Kind.DATA)
            received += data
            raw.send(room_for(0, len(data)), room_for(1, len(data)))
        assert received == b"".join(message(b"%d" % n + b" " * 29_999) for n in range(3))
        assert (await raw.headers())["grpc-status"] == "0"


async def test_what_found_no_room_is_sent_when_there_is_some(serve):
    async def push(request, context):
        assert not context.write_soon(bytes(70_000))
        await context.drain()
        await asyncio.Event().wait()

    async with serve(Push=grpc.unary_stream_rpc_method_handler(push)) as s, s.raw() as raw:
        raw.send(call("Push", b""))
        num_bytes = 0
        while num_bytes < 70_005:
            num_bytes += len((await raw.until(Kind.DATA))[3])
            raw.send(room_for(0, 1 << 14), room_for(1, 1 << 14))


async def test_a_client_that_reads_nothing_holds_no_more_than_a_few_buffers(serve):
    async with serve() as s, s.raw(window=(1 << 31) - 1 - 65_535) as raw:
        raw.send(call("Write", b"100000 10000"))
        await wait_for(lambda: s.connection._is_write_paused)
        waiting = s.connection._transport.get_write_buffer_size()
        waiting += s.connection._outbox._num_out_bytes
        assert waiting < 1 << 20
        assert (await raw.until(Kind.DATA))[3].startswith(message(b"0".ljust(10_000))[:10])


async def test_a_client_that_reads_again_gets_everything(serve):
    async with serve() as s, s.raw(window=(1 << 31) - 1 - 65_535) as raw:
        raw.send(call("Write", b"3000 10000"))
        await wait_for(lambda: s.connection._is_write_paused)
        for number in range(3000):
            assert (await raw.until(Kind.DATA))[3][5:10] == b"%-5d" % number
        assert (await raw.headers())["grpc-status"] == "0"


async def test_an_error_comes_after_the_messages_before_it(serve):
    async def fail(request, context):
        # Too large for a frame of HTTP/2 as this client takes them, so they are not sent at once.
        for number in range(3):
            assert not context.write_soon(b"%d" % number * 20_000)
        raise InvalidArgument("no more", field="x")

    async with serve(Fail=grpc.unary_stream_rpc_method_handler(fail)) as s, s.raw() as raw:
        raw.send(call("Fail", b""))
        received = b""
        while len(received) < 3 * 20_005:
            received += (await raw.until(Kind.DATA))[3]
        assert received == b"".join(message(b"%d" % number * 20_000) for number in range(3))
        assert (await raw.headers())["grpc-message"] == "no more"


async def test_unread_requests_are_not_taken_without_end(serve):
    async with serve(Stuck=grpc.stream_stream_rpc_method_handler(_never)) as s, s.raw() as raw:
        raw.send(headers_frame(1, headers=request_to("Stuck")))
        raw.send(*[data_frame(1, message(bytes(995)), 0)] * 1048, frame(Kind.PING, 0, 0, bytes(8)))
        await raw.until(Kind.PING)
        assert s.connection._calls[1]._num_unread_bytes == 1_048_000
        raw.send(data_frame(1, message(bytes(995)), 0))
        assert await raw.reset_code() == ErrorCode.FLOW_CONTROL_ERROR
        await is_idle(s)


async def test_unread_requests_of_ended_calls_leave_the_connection_its_window(serve):
    async with serve(Stuck=grpc.stream_stream_rpc_method_handler(_never)) as s, s.raw() as raw:
        for stream_id in range(1, 65, 2):
            raw.send(headers_frame(stream_id, headers=request_to("Stuck")))
            raw.send(*[data_frame(stream_id, message(bytes(999_995 // 4)), 0)] * 4)
            raw.send(frame(Kind.RST_STREAM, 0, stream_id, NUMBER.pack(ErrorCode.CANCEL)))
        # Twice what the connection's window holds has been sent and not been read.
        raw.send(headers_frame(99), data_frame(99, message(b"x")))
        assert (await raw.until(Kind.DATA))[3] == message(b"re: x")


async def _never(requests, context):
    await asyncio.Event().wait()
    yield b""


async def test_headers_that_end_a_stream_of_requests_end_it_empty(serve):
    async with serve() as s, s.raw() as raw:
        raw.send(headers_frame(1, END_STREAM, request_to("Total")))
        assert (await raw.until(Kind.DATA))[3] == message(b"0")
        assert (await raw.headers()) == {"grpc-status": "0"}
