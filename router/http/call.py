"""One HTTP request as the endpoints see it: its headers, its body, its reply, its end."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import orjson
from starlette.types import Receive, Scope, Send

from core.errors import InvalidArgument
from core.rpc import MAX_REQUEST_BYTES
from core.tracing import TraceContext
from router.http.bodies import ChunkedBody
from router.http.errors import CLIENT_LEFT, ClientLeft, HttpError
from router.text_lane import TextLane
from router.validate import check_request_id

MAX_BODY_BYTES = MAX_REQUEST_BYTES
MAX_DISCARDED_BYTES = 16 * MAX_BODY_BYTES
"""A body that is too long is read up to here: many clients look for an answer only then."""
BODY_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1e6

_CLOSE = {"connection": "close"}
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Call:
    """A request and the reply to it. `scope`, `receive` and `send` are ASGI's."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.request_id = uuid.uuid4().hex
        self.is_named = False
        """Whether the client chose the request id."""
        self.tenant = ""
        self.status = CLIENT_LEFT
        """Of the reply, once it has begun."""
        self.names: Mapping[str, str] = {}
        """Parameters' names by field of GenerateRequest, where they differ."""

    def header(self, name: str) -> str | None:
        value = self._headers.get(name.encode("ascii"))
        return None if value is None else value.decode("latin-1")

    @property
    def trace(self) -> TraceContext:
        """The client's trace, if it has one."""
        return TraceContext(self.header("traceparent") or "", self.header("tracestate") or "")

    def take_request_id(self) -> None:
        """Uses the client's `x-request-id` if there is one. Raises HttpError."""
        given = self.header("x-request-id")
        if not given:
            return
        try:
            check_request_id(given)
        except InvalidArgument as error:
            message = error.message.replace("request_id", "x-request-id", 1)
            raise HttpError(400, message, code="invalid_value", param="x-request-id") from None
        self.request_id = given
        self.is_named = True

    def timeout_s(self, longest_s: float) -> float:
        """The `x-request-timeout` in seconds, at most `longest_s`. Raises HttpError."""
        given = self.header("x-request-timeout")
        if given is None:
            return longest_s
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            message = (
                f"x-request-timeout must be a number of seconds over 0 and at most "
                f"{MAX_TIMEOUT_S:.0f}, got {given[:40]!r}"
            )
            raise HttpError(400, message, code="invalid_value", param="x-request-timeout")
        return min(seconds, longest_s)

    async def body(self) -> bytes:
        """Reads the body. Raises HttpError when it is too long or does not come, ClientLeft."""
        declared = self.header("content-length") or ""
        if declared.isdecimal() and int(declared) > MAX_DISCARDED_BYTES:
            raise _body_too_long()
        if self.scope["baton.body"].is_asked:
            return await self._read_body()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_body()
        except TimeoutError:
            message = f"the body did not come within {BODY_TIMEOUT_S:.0f} s"
            raise HttpError(408, message, code="timeout", headers=_CLOSE) from None

    async def _read_body(self) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            num_bytes += len(message["body"])
            if num_bytes <= MAX_BODY_BYTES:
                parts.append(message["body"])
            is_end = not message["more_body"]
            if num_bytes > MAX_BODY_BYTES and (is_end or num_bytes > MAX_DISCARDED_BYTES):
                raise _body_too_long()
            if is_end:
                return b"".join(parts)

    @contextmanager
    def while_connected(self) -> Iterator[None]:
        """Cancels what is inside, and raises ClientLeft, as soon as the client is gone."""
        body: ChunkedBody = self.scope["baton.body"]
        if body.is_lost:
            raise ClientLeft
        task = asyncio.current_task()
        assert task is not None
        num_cancelling = task.cancelling()
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            task.cancel()

        body.watch(leave)
        try:
            yield
        except asyncio.CancelledError:
            if has_left and task.uncancel() <= num_cancelling:
                raise ClientLeft from None
            raise
        finally:
            body.watch(None)

    async def reply(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends a whole response."""
        self.status = status
        all_headers = {
            "content-type": content_type,
            "content-length": str(len(body)),
            "x-request-id": self.request_id,
            **(headers or {}),
        }
        encoded = [(name.encode(), value.encode()) for name, value in all_headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_json(self, value: object) -> None:
        await self.reply(200, orjson.dumps(value))

    async def fail(self, error: HttpError) -> None:
        """Sends an error response."""
        await self.reply(error.status, orjson.dumps(error.body), headers=error.headers)

    async def start_events(self, first: bytes, *, is_last: bool = False) -> None:
        """Begins a response of server-sent events with `first`, in one piece."""
        self.status = 200
        body: ChunkedBody = self.scope["baton.body"]
        body.begin()
        headers = [*_STREAM_HEADERS, (b"x-request-id", self.request_id.encode())]
        with body.in_one_write():
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self.send_event(first, is_last=is_last)

    def text_lane(self, event: tuple[bytes, bytes]) -> TextLane:
        """Sends events that bring a text between two byte strings."""
        body: ChunkedBody = self.scope["baton.body"]
        return body.text_lane(*event)

    async def send_event(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends a part of a stream; waits while the client does not read."""
        self.scope["baton.body"].flush(len(data), is_last=is_last)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _body_too_long() -> HttpError:
    message = f"the body is too long; the limit is {MAX_BODY_BYTES} bytes"
    return HttpError(413, message, code="request_too_large", headers=_CLOSE)
