"""One client's connection: streams of HTTP/2 are calls, and calls' messages are data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from core.http2.base import Headers, Stream, encode_headers
from core.http2.frames import ErrorCode, Http2Error
from core.http2.messages import Refused
from core.rpc import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from router.grpc_server.call import Call
from router.grpc_server.head import RESPONSE, NotGrpc, read_head, trailers
from router.grpc_server.http2 import ServerHttp2
from router.grpc_server.method import End, Method
from router.grpc_server.outbox import Outbox, SendBatch

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 20
"""Of all clients' requests, before anybody has looked at who sends them."""
_TOO_MUCH_WAITS = End(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "too many bytes of requests that are not whole wait"
)
_LINGER_S = 1.0
"""For clients to leave, and to say that they go on reading."""

_RESPONSE = encode_headers(RESPONSE)
_OK = encode_headers(trailers(grpc.StatusCode.OK))


@dataclass
class Shared:
    """What a server's connections have in common."""

    methods: dict[str, Method] = field(default_factory=dict)
    """By path."""
    batch: SendBatch = field(default_factory=SendBatch)
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Of servicers; some may still clean up behind the end of their call."""
    num_waiting_bytes: int = 0
    """Of all connections."""
    is_stopping: bool = False
    """New connections are sent away."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection has ended."""


class Connection(asyncio.Protocol):
    """A client may have any number of calls at a time. It is its HTTP/2's Listener."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._calls: dict[int, Call] = {}
        """By stream id."""
        self._room: asyncio.Future[None] | None = None
        """Waits until the client may take more."""
        self._is_write_paused = False
        self._is_heard = False
        self._is_going_away = False
        self._is_closed = False
        self.num_waiting_bytes = 0
        """Of requests that are not whole, or that servicers have not read."""

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._shared.connections.add(self)
        self._outbox = Outbox(self._transport, self._shared.batch)
        self._http2 = ServerHttp2(self, self._outbox.send)
        self._timer = self._later(KEEPALIVE_S, self._ask_for_life)
        if self._shared.is_stopping:
            self.go_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.connections.discard(self)
        self._shared.left.set()
        self._timer.cancel()
        self._drop_calls()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._is_heard = True
        try:
            self._http2.receive(data)
        except Http2Error as error:
            logger.info("a client is cut off: %s", error)
            self._http2.go_away(error.code)
            self._close()

    def pause_writing(self) -> None:
        # A client that does not read is not heard either, so that answers to what it sends
        # (pings, say) cannot pile up here.
        self._is_write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
        self.on_room()

    # What HTTP/2 calls.

    def on_request(self, stream: Stream, headers: Headers) -> None:
        """A call begins, unless there is something wrong with it."""
        if self._is_going_away:
            self._http2.reset(stream, ErrorCode.REFUSED_STREAM)
            return
        try:
            head = read_head(headers)
            method = self._shared.methods.get(head.path)
            if method is None:
                raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {head.path}")
        except NotGrpc as error:
            status = [(b":status", b"%d" % error.status)]
            self._http2.send_headers(stream, encode_headers(status), is_last=True)
        except Refused as error:
            self._send_end(stream, End(error.code, error.message), is_begun=False)
        else:
            call = self._calls[stream.id] = Call(self, stream, method, head)
            call.begin()

    def on_data(self, stream: Stream, data: bytes) -> None:
        """A part of a call's request."""
        call = self._calls[stream.id]
        try:
            num_bytes = call.receive(data)
        except Refused as error:
            self._http2.consumed(stream, len(data))
            self.end(call, End(error.code, error.message))
        else:
            self._http2.consumed(stream, num_bytes)

    def on_end(self, stream: Stream) -> None:
        """A call's request is whole."""
        call = self._calls[stream.id]
        try:
            call.asked()
        except Refused as error:
            self.end(call, End(error.code, error.message))

    def on_reset(self, stream: Stream, code: int) -> None:
        """The client has cancelled a call."""
        call = self._calls.pop(stream.id)
        call.over()
        self._leave_if_idle()

    def on_room(self) -> None:
        """The client may take more."""
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    # What calls call.

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a call's servicer."""
        tasks = self._shared.tasks
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def send_message(self, call: Call, data: bytes) -> bool:
        """Sends `data` if the client has room for all of it; it runs for every token."""
        if call.is_over:
            return True
        http2, stream, size = self._http2, call.stream, len(data)
        if (
            size > http2.initial_window + stream.send_credit
            or size > http2.send_window
            or size > http2.max_frame_bytes
            or self._is_write_paused
        ):
            return False
        if not call.is_begun:
            call.is_begun = True
            http2.send_headers(stream, _RESPONSE)
        http2.send_data(stream, data)
        return True

    def send_piece(self, call: Call, data: bytes, start: int) -> int:
        """Sends as much of `data[start:]` as the client has room for; returns how much that was."""
        size = min(len(data) - start, self._http2.room(call.stream))
        if size <= 0 or not self.send_message(call, data[start : start + size]):
            return 0
        return size

    async def wait_room(self) -> None:
        """Returns when the client may have more room than before."""
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    def consumed(self, call: Call, num_bytes: int) -> None:
        """So many bytes of the call's requests have been dealt with."""
        if not call.is_over:
            self._http2.consumed(call.stream, num_bytes)

    def count_waiting(self, num_bytes: int) -> None:
        """So many bytes more, or less, of requests wait. When that is too many in all, calls of
        the client with the most have to end: raises Refused if it is this one."""
        shared = self._shared
        self.num_waiting_bytes += num_bytes
        shared.num_waiting_bytes += num_bytes
        while num_bytes > 0 and shared.num_waiting_bytes > MAX_WAITING_BYTES:
            greediest = max(shared.connections, key=lambda other: other.num_waiting_bytes)
            if greediest is self:
                raise Refused(_TOO_MUCH_WAITS.code, _TOO_MUCH_WAITS.message)
            greediest.end_greediest()

    def end_greediest(self) -> None:
        """Ends the call whose requests take the most memory."""
        call = max(self._calls.values(), key=lambda call: call.num_waiting_bytes)
        self.end(call, _TOO_MUCH_WAITS)

    def end(self, call: Call, end: End) -> None:
        """Ends `call`, if it has not ended yet, and with it whatever its servicer does."""
        if self._calls.pop(call.stream.id, None) is None:
            return
        if call.is_mid_message:
            self._http2.reset(call.stream, ErrorCode.CANCEL)
        else:
            self._send_end(call.stream, end, is_begun=call.is_begun)
        call.over()
        self._leave_if_idle()

    # What the server calls.

    def go_away(self) -> None:
        """Takes no new call; the connection ends with the last one."""
        if not self._is_going_away:
            self._is_going_away = True
            self._http2.go_away(ErrorCode.NO_ERROR)
            self._leave_if_idle()

    def end_all(self, end: End) -> None:
        """Ends all calls."""
        for call in list(self._calls.values()):
            self.end(call, end)

    def abort(self) -> None:
        """Cuts the connection."""
        self._transport.abort()

    def _send_end(self, stream: Stream, end: End, *, is_begun: bool) -> None:
        if end.code is grpc.StatusCode.OK and is_begun:
            block = _OK
        else:
            last = trailers(end.code, end.message, end.metadata)
            block = encode_headers(last if is_begun else [*RESPONSE, *last])
        self._http2.send_headers(stream, block, is_last=True)

    def _leave_if_idle(self) -> None:
        if self._is_going_away and not self._calls:
            self._close()

    def _close(self) -> None:
        """When all that waits has been sent, and the client has left, too.

        Would the server be the first to leave, then something that the client sends meanwhile
        (room for more, say) could cost it the end of its answers: TCP resets the connection.
        """
        if self._is_closed:
            return
        self._drop_calls()
        self._is_closed = True
        self._outbox.close()
        self._timer.cancel()
        if not self._transport.is_closing():
            self._timer = self._later(_LINGER_S, self._leave)

    def _leave(self) -> None:
        """Unless the client still takes what has been sent."""
        if self._outbox.has_taken():
            self._timer = self._later(_LINGER_S, self._leave)
        else:
            self._transport.abort()

    def _drop_calls(self) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.over()

    def _later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        self._is_heard = False
        self._outbox.look()
        return asyncio.get_running_loop().call_later(delay_s, call)

    def _ask_for_life(self) -> None:
        now = asyncio.get_running_loop().time()
        for call in list(self._calls.values()):
            call.end_if_late(now)
        if self._is_closed:
            return  # the last call of a connection that was going away
        if self._is_heard:
            self._timer = self._later(KEEPALIVE_S, self._ask_for_life)
        else:
            self._http2.ping()
            self._timer = self._later(KEEPALIVE_TIMEOUT_S, self._look_for_life)

    def _look_for_life(self) -> None:
        # One that reads slowly is not heard while it does.
        if self._is_heard or self._outbox.has_taken():
            self._timer = self._later(KEEPALIVE_S, self._ask_for_life)
        else:
            logger.info("a client is gone: it does not answer pings")
            self._transport.abort()
