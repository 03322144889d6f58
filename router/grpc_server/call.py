"""One call: its messages in and out, its servicer's task, its end."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from core.errors import ERROR_METADATA_KEY, status_of, to_detail
from core.rpc import MAX_MESSAGE_BYTES, is_cancelled, stray_cancellation, to_own_error
from router.grpc_server.head import Metadata, RequestHead
from router.grpc_server.http2 import Stream
from router.grpc_server.messages import PREFIX, MessageReader, Refused

if TYPE_CHECKING:
    from router.grpc_server.connection import Connection

_DEADLINE_GRACE_S = 0.05
"""For the servicer, which has more to say of it."""


@dataclass(frozen=True)
class Method:
    """How one method is called."""

    path: str
    behaviour: Callable[[Any, Any], Any]
    is_generator: bool
    """Whether it yields its messages. Another one writes them to the context."""
    has_one_request: bool
    has_one_response: bool
    deserialize: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]

    @classmethod
    def of(cls, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Method:
        """As protoc's plugin registers it."""
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        return cls(
            path=path,
            behaviour=behaviour,
            is_generator=inspect.isasyncgenfunction(behaviour),
            has_one_request=not handler.request_streaming,
            has_one_response=not handler.response_streaming,
            deserialize=handler.request_deserializer or bytes,
            serialize=handler.response_serializer or bytes,
        )


@dataclass(frozen=True)
class End:
    """How a call ends."""

    code: grpc.StatusCode
    message: str = ""
    metadata: Metadata = ()


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
        self.is_mid_message = False
        """Whether a part of a message has been sent, and not all of it."""
        self._task: asyncio.Task[None] | None = None
        self._connection = connection
        self._method = method
        self._head = head
        self._reader = MessageReader(head.encoding, MAX_MESSAGE_BYTES)
        self._messages: deque[bytes] = deque()
        self._num_unread_bytes = 0
        """Of a stream of requests: what the client may send again once its servicer has read."""
        self._news: asyncio.Future[None] | None = None
        self._held = b""
        """Messages for which the client had no room yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        if head.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + head.timeout_s
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
            await self._send_held()

    def write_soon(self, message: Any) -> bool:
        """Sends `message` now if the client has room, and otherwise with what is written next.

        Returns whether it had, and so whether another message may follow at once.
        """
        data = self._method.serialize(message)
        data = PREFIX.pack(False, len(data)) + data
        if not self._held and self._connection.send_message(self, data):
            return True
        self._held += data
        return False

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call."""
        raise _Aborted(End(code, details, trailing_metadata))

    # What the connection calls.

    def receive(self, data: bytes) -> int:
        """Takes what has come; returns how many bytes more may come instead. Raises Refused."""
        self._messages += self._reader.feed(data)
        if self._method.has_one_request:
            if len(self._messages) > 1:
                raise Refused(grpc.StatusCode.UNIMPLEMENTED, "the method takes one message")
            return len(data)
        self._num_unread_bytes += len(data)
        self._wake()
        return 0

    def begin(self) -> None:
        """Its headers are there."""
        if not self._method.has_one_request:
            self._start()

    def asked(self) -> None:
        """The client has sent everything. Raises Refused."""
        if not self._reader.is_between_messages:
            raise Refused(grpc.StatusCode.INTERNAL, "the last message is not whole")
        if not self._method.has_one_request:
            self._wake()
            return
        if not self._messages:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "the method takes one message, not none")
        self._start()

    def over(self) -> None:
        """Nothing more is sent: frees what the call holds and ends its servicer's work."""
        self.is_over = True
        self._held = b""
        self._messages.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _start(self) -> None:
        self._task = self._connection.start(self._run())

    async def _run(self) -> None:
        try:
            await self._serve()
            await self._send_held()
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
        self._connection.end(self, end)

    def _failed(self, exception: Exception) -> End:
        error = to_own_error(exception, self._method.path)
        detail = to_detail(error).SerializeToString()
        return End(status_of(error).grpc, error.message, ((ERROR_METADATA_KEY, detail),))

    async def _serve(self) -> None:
        method = self._method
        request: Any
        if method.has_one_request:
            request = self._deserialized(self._messages.popleft())
        else:
            request = self._requests()
        if method.has_one_response:
            await self.write(await method.behaviour(request, self))
        elif method.is_generator:
            # A cancelled call closes the servicer's generator at once and in this task.
            async with aclosing(method.behaviour(request, self)) as messages:
                async for message in messages:
                    await self.write(message)
        else:
            await method.behaviour(request, self)

    def _deserialized(self, message: bytes) -> Any:
        try:
            return self._method.deserialize(message)
        except DecodeError as error:
            raise Refused(
                grpc.StatusCode.INTERNAL, f"a message cannot be parsed: {error}"
            ) from None

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            while self._messages:
                message = self._messages.popleft()
                if not self._messages:
                    self._connection.consumed(self, self._num_unread_bytes)
                    self._num_unread_bytes = 0
                yield self._deserialized(message)
            if self.stream.is_ended:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _send_held(self) -> None:
        """In pieces, as the client makes room."""
        data = memoryview(self._held)
        while data and not self.is_over:
            num_sent = self._connection.send_piece(self, data)
            if num_sent == 0:
                await self._connection.wait_room()
            data = data[num_sent:]
            self.is_mid_message = 0 < len(data) < len(self._held)
        self._held = b""

    def _expire(self) -> None:
        self._connection.end(
            self, End(grpc.StatusCode.DEADLINE_EXCEEDED, "the time of the call is over")
        )
