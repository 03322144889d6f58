"""One call: its messages in and out, its servicer's task, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from core.errors import ERROR_METADATA_KEY, status_of, to_detail
from core.http2.base import Stream
from core.http2.messages import PREFIX, HeldMessages, MessageReader, Refused
from core.rpc import MAX_MESSAGE_BYTES, is_cancelled, stray_cancellation, to_own_error
from router.grpc_server.head import Metadata, RequestHead
from router.grpc_server.method import End, Method

if TYPE_CHECKING:
    from router.grpc_server.connection import Connection

_DEADLINE_GRACE_S = 0.05
"""For the servicer, which has more to say of it."""
_REQUEST_TIMEOUT_S = 60.0
"""For a request to come whole and to be read, give or take a connection's keep-alive."""


_OK = End(grpc.StatusCode.OK)


class _Aborted(Exception):
    def __init__(self, end: End) -> None:
        super().__init__(end.message)
        self.end = end


class Call:
    """What servicers get as the context.

    Its connection tells it what comes, and is told what is to be sent.
    """

    def __init__(
        self, connection: Connection, stream: Stream, method: Method, head: RequestHead
    ) -> None:
        self.stream = stream
        self.is_over = False
        self.is_begun = False
        """Whether headers have been sent."""
        self._task: asyncio.Task[None] | None = None
        self._connection = connection
        self._method = method
        self._head = head
        self._reader = MessageReader(head.encoding, MAX_MESSAGE_BYTES)
        self._num_unread_bytes = 0
        """Of a stream of requests: what the client may send again once its servicer has read."""
        self._news: asyncio.Future[None] | None = None
        self._held = HeldMessages()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self.num_waiting_bytes = 0
        """Of requests, as the connection knows it."""
        loop = asyncio.get_running_loop()
        self._waits_since = loop.time()
        """Since when its request, or the next one of a stream, has not been read."""
        if head.timeout_s is not None:
            self._deadline = self._waits_since + head.timeout_s
            self._timer = loop.call_at(self._deadline + _DEADLINE_GRACE_S, self._expire)

    # What servicers call.

    def invocation_metadata(self) -> Metadata:
        """What the client sent with the call, names in lower case."""
        return self._head.metadata

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - asyncio.get_running_loop().time())

    async def write(self, message: Any) -> None:
        """Sends `message` as soon as the client has room for it."""
        if not self.write_soon(message):
            await self.drain()

    def write_soon(self, message: Any) -> bool:
        """Sends `message` now if the client has room, and otherwise with `drain` or `write`.

        Returns whether it had, and so whether another message may follow at once.
        """
        data = self._method.serialize(message)
        data = PREFIX.pack(False, len(data)) + data
        if not self._held and self._connection.send_message(self, data):
            return True
        self._held.add(data)
        return False

    async def drain(self) -> None:
        """Sends what has found no room yet, in pieces, as the client makes room."""
        while self._held and not self.is_over:
            if not self._held.send_piece(self._send_piece):
                await self._connection.wait_room()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call."""
        raise _Aborted(End(code, details, trailing_metadata))

    # What the connection calls.

    @property
    def is_mid_message(self) -> bool:
        """Whether a part of a message has been sent, and not all of it."""
        return self._held.is_mid_message

    def receive(self, data: bytes) -> int:
        """Takes what has come; returns how many bytes more may come instead. Raises Refused."""
        if self._reader.is_empty and not self._method.has_one_request:
            self._waits_since = asyncio.get_running_loop().time()
        self._reader.feed(data)
        self._count_waiting()
        if self._method.has_one_request:
            if self._reader.has_more():
                raise Refused(grpc.StatusCode.UNIMPLEMENTED, "the method takes one message")
            return len(data)
        self._num_unread_bytes += len(data)
        if not self._reader.has_message():
            # It may be larger than the stream's window: its rest has to come.
            return self._take_unread()
        self._wake()
        return 0

    def begin(self) -> None:
        """Its headers are there."""
        if not self._method.has_one_request:
            self._start()

    def asked(self) -> None:
        """The client has sent everything. Raises Refused."""
        if not self._method.has_one_request:
            self._wake()
            return
        if self._reader.is_empty:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "the method takes one message, not none")
        if not self._reader.has_message():
            raise _not_whole()
        self._start()

    def end_if_late(self, now: float) -> None:
        """Ends it if a request has not come whole, or waits unread, after a while (`now` in the
        loop's time): what waits counts against all clients."""
        is_waiting = self._task is None or not self._reader.is_empty
        if is_waiting and now - self._waits_since > _REQUEST_TIMEOUT_S:
            message = f"the request did not come within {_REQUEST_TIMEOUT_S:.0f} s"
            self._connection.end(self, End(grpc.StatusCode.DEADLINE_EXCEEDED, message))

    def over(self) -> None:
        """Nothing more is sent: frees what the call holds and ends its servicer's work."""
        # What nobody is going to read counts in the connection's window.
        self._connection.consumed(self, self._take_unread())
        self.is_over = True
        self._held.clear()
        self._reader.clear()
        self._count_waiting()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        # A cancelled task keeps its frames, and so the call.
        self._task = None

    def _start(self) -> None:
        self._task = self._connection.start(self._run())

    async def _run(self) -> None:
        try:
            await self._serve()
            await self.drain()
            end = _OK
        except _Aborted as aborted:
            end = aborted.end
        except Refused as refused:
            end = End(refused.code, refused.message)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            end = self._failed(stray_cancellation())
        except Exception as error:
            end = self._failed(error)
        # What was written before a failure comes before it, if the client has room.
        while self._held and self._held.send_piece(self._send_piece):
            pass
        self._connection.end(self, end)

    def _failed(self, exception: Exception) -> End:
        error = to_own_error(exception, self._method.path)
        detail = to_detail(error).SerializeToString()
        return End(status_of(error).grpc, error.message, ((ERROR_METADATA_KEY, detail),))

    async def _serve(self) -> None:
        if self._method.has_one_request:
            await self._answer(self._next_request())
        else:
            async with aclosing(self._requests()) as requests:
                await self._answer(requests)

    async def _answer(self, request: Any) -> None:
        method = self._method
        if method.has_one_response:
            await self.write(await method.behaviour(request, self))
        elif method.is_generator:
            # A cancelled call closes the servicer's generator at once and in this task.
            async with aclosing(method.behaviour(request, self)) as messages:
                async for message in messages:
                    await self.write(message)
        else:
            await method.behaviour(request, self)

    def _next_request(self) -> Any:
        message = self._reader.take()
        self._waits_since = asyncio.get_running_loop().time()
        self._count_waiting()
        try:
            return self._method.deserialize(message)
        except DecodeError as error:
            raise Refused(
                grpc.StatusCode.INTERNAL, f"a message cannot be parsed: {error}"
            ) from None

    async def _requests(self) -> AsyncGenerator[Any, None]:
        while True:
            while self._reader.has_message():
                request = self._next_request()
                if not self._reader.has_message():
                    self._connection.consumed(self, self._take_unread())
                yield request
            if self.stream.is_ended:
                if not self._reader.is_empty:
                    raise _not_whole()
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _count_waiting(self) -> None:
        """Raises Refused when there is no room for what has come."""
        num_bytes = self._reader.num_bytes
        increase, self.num_waiting_bytes = num_bytes - self.num_waiting_bytes, num_bytes
        self._connection.count_waiting(increase)

    def _take_unread(self) -> int:
        num_bytes, self._num_unread_bytes = self._num_unread_bytes, 0
        return num_bytes

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _send_piece(self, message: bytes, start: int) -> int:
        return self._connection.send_piece(self, message, start)

    def _expire(self) -> None:
        self._connection.end(
            self, End(grpc.StatusCode.DEADLINE_EXCEEDED, "the time of the call is over")
        )


def _not_whole() -> Refused:
    return Refused(grpc.StatusCode.INTERNAL, "the last message is not whole")
