"""One call and its connection: messages out, messages in, the end."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import cast

import grpc

from core.http2.base import Headers, Stream, encode_headers
from core.http2.frames import ErrorCode, Http2Error
from core.http2.messages import PREFIX, HeldMessages, MessageReader, Refused
from core.rpc import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, MAX_MESSAGE_BYTES
from router.grpc_client.http2 import ClientHttp2
from router.grpc_client.status import CallFailed, check_answer, check_end, of_reset

_CLOSE_S = 0.02
"""For the system to take what has been sent. Over TLS a connection is not closed before the server
has said goodbye, too, which grpcio does not."""


class Call(asyncio.Protocol):
    """Begins as soon as it is connected. It is its HTTP/2's Listener."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._transport: asyncio.Transport | None = None
        self._fields: dict[bytes, bytes] = {}
        """Headers of the answer, the last ones, too."""
        # Nothing asks for compression.
        self._reader = MessageReader("identity", MAX_MESSAGE_BYTES)
        self._messages: deque[bytes] = deque()
        """Those that have not been read."""
        self._num_unread_bytes = 0
        """What the server may send again once all that is there has been dealt with."""
        self._news: asyncio.Future[None] | None = None
        """Waits for a message or the end."""
        self._held = HeldMessages()
        self._is_write_paused = False
        self._is_heard = False
        self._is_over = False
        self._failure: CallFailed | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()

    # What the caller calls.

    def keep_alive(self) -> None:
        """From now on the server is asked for signs of life, until the call is over."""
        if not self._is_over:
            self._timer = self._later(KEEPALIVE_S)

    def send(self, message: bytes) -> None:
        """Sends `message` behind those before it, as the server makes room.

        All that one turn of the event loop sends leaves in one system call (uvloop's doing).
        Dropped when the call is over, which `read` tells.
        """
        if not self._is_over:
            self._held.add(PREFIX.pack(False, len(message)) + message)
            self._send_held()

    async def read(self, timeout_s: float) -> bytes | None:
        """The next message; None when the call has ended well. Others have their turn meanwhile.

        To read again is to have dealt with the message before: only then may the server send as
        much again. Raises CallFailed, and TimeoutError when nothing comes for `timeout_s`.
        """
        if self._messages or self._is_over:
            await asyncio.sleep(0)
        else:
            self._give_back()
            await self._wait(timeout_s)
        if self._messages:
            return self._messages.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def abort(self) -> None:
        """Cuts the connection, also one that is still being made."""
        self._finish(_closed())
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Takes the call back if it has not ended, and closes its connection."""
        assert self._transport is not None, "a call that is not connected is aborted"
        self._cancel(_closed())
        self._transport.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._lost.wait()
        finally:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            # uvloop may finish a handshake when nobody waits for it any more.
            self._transport.abort()
            return
        self._http2 = ClientHttp2(self, self._transport.write)
        self._stream = self._http2.open(encode_headers(self._headers))

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._is_heard = True
        try:
            self._http2.receive(data)
        except Http2Error as error:
            self._http2.go_away(error.code)
            self._finish(_lost(f"what comes is not HTTP/2 as it should be: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        if not self._is_over:
            goodbye = self._http2.goodbye
            parts = ["the connection was lost", str(exc or ""), goodbye and f"GOAWAY: {goodbye}"]
            self._finish(_lost("; ".join(filter(None, parts))))

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._send_held()

    # What HTTP/2 calls.

    def on_headers(self, stream: Stream, headers: Headers) -> None:
        """Of the answer: informational ones, the first, or the last."""
        fields = dict(headers)
        if not self._fields and fields.get(b":status", b"").startswith(b"1"):
            return
        is_first = not self._fields
        self._fields |= fields
        if stream.is_ended:
            return
        if is_first:
            try:
                check_answer(fields)
            except CallFailed as failure:
                self._cancel(failure)
        else:
            self._break("headers among messages")

    def on_data(self, stream: Stream, data: bytes) -> None:
        """A part of a message, or several."""
        if not self._fields:
            self._break("data without headers")
            return
        try:
            self._reader.feed(data)
            while self._reader.has_message():
                self._messages.append(self._reader.take())
        except Refused as refused:
            self._cancel(CallFailed(refused.code, refused.message))
            return
        self._num_unread_bytes += len(data)
        if self._messages:
            self._wake()
        else:
            # The message may be larger than the stream's window: its rest has to come.
            self._give_back()

    def on_end(self, stream: Stream) -> None:
        """The server has sent everything."""
        try:
            check_end(self._fields)
            if not self._reader.is_empty:
                raise CallFailed(grpc.StatusCode.INTERNAL, "the last message is not whole")
        except CallFailed as failure:
            self._finish(failure)
        else:
            self._finish(None)

    def on_reset(self, stream: Stream, code: int) -> None:
        """The server has cancelled the call, or refused it."""
        self._finish(of_reset(code))

    def on_room(self) -> None:
        """The server may take more."""
        self._send_held()

    def _send_held(self) -> None:
        """Sends what there is room for, in order."""
        while self._held and self._held.send_piece(self._send_piece):
            pass

    def _send_piece(self, message: bytes, start: int) -> int:
        size = min(len(message) - start, self._http2.room(self._stream))
        if size <= 0 or self._is_write_paused:
            return 0
        self._http2.send_data(self._stream, message[start : start + size])
        return size

    def _give_back(self) -> None:
        num_bytes, self._num_unread_bytes = self._num_unread_bytes, 0
        if num_bytes:
            self._http2.consumed(self._stream, num_bytes)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        timer = loop.call_later(timeout_s, self._expire)
        try:
            await self._news
        finally:
            timer.cancel()
            self._news = None

    def _expire(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _break(self, what: str) -> None:
        """The server has broken the protocol."""
        self._cancel(CallFailed(grpc.StatusCode.INTERNAL, what), ErrorCode.PROTOCOL_ERROR)

    def _cancel(self, failure: CallFailed, code: ErrorCode = ErrorCode.CANCEL) -> None:
        if not self._is_over:
            self._http2.reset(self._stream, code)
            self._finish(failure)

    def _finish(self, failure: CallFailed | None) -> None:
        """Nothing more is sent or taken; messages that are whole can still be read."""
        if self._is_over:
            return
        self._is_over, self._failure = True, failure
        self._held.clear()
        self._reader.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _later(self, delay_s: float, *, is_asked: bool = False) -> asyncio.TimerHandle:
        self._is_heard = False
        return asyncio.get_running_loop().call_later(delay_s, self._look_for_life, is_asked)

    def _look_for_life(self, is_asked: bool) -> None:
        """A server from which nothing comes is asked whether it is there, and then given up."""
        if self._is_heard:
            self._timer = self._later(KEEPALIVE_S)
        elif not is_asked:
            self._http2.ping()
            self._timer = self._later(KEEPALIVE_TIMEOUT_S, is_asked=True)
        else:
            self._finish(_lost("the server does not answer pings"))


def _closed() -> CallFailed:
    return CallFailed(grpc.StatusCode.CANCELLED, "the call was closed")


def _lost(reason: str) -> CallFailed:
    return CallFailed(grpc.StatusCode.UNAVAILABLE, reason)
