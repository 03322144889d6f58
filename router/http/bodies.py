"""Bodies of responses on their way to the sockets, past ASGI and its coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)


class WriteBatch:
    """What many responses are to send, written in one go at the end of the loop's turn.

    One write after the other, with nothing computed between, finds the clients awake: waking
    a process costs more than the rest of a write.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[asyncio.Transport, bytes]] = []
        """In order. Who adds the first one calls `schedule`."""

    def schedule(self) -> None:
        """Has all that waits by then sent when the loop's turn ends."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what waits."""
        waiting = self.waiting.copy()
        self.waiting.clear()
        for transport, data in waiting:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:  # others wait behind it
                logger.exception("a response cannot be written")
                transport.abort()


class _TextWriter:
    """All that the texts of one response need, in one place: memory that each token touches."""

    __slots__ = ("_after", "_batch", "_before", "_flow", "_num_bytes", "_transport", "_waiting")

    def __init__(
        self, cycle: RequestResponseCycle, batch: WriteBatch, before: bytes, after: bytes
    ) -> None:
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._batch = batch
        self._waiting = batch.waiting
        self._before = before
        self._after = after
        self._num_bytes = len(before) + len(after)

    def write_chunk(self, text: str) -> bool:
        data = orjson.dumps(text)
        waiting = self._waiting
        if not waiting:
            self._batch.schedule()
        num_bytes = self._num_bytes + len(data)
        chunk = b"%x\r\n%b%b%b\r\n" % (num_bytes, self._before, data, self._after)
        waiting.append((self._transport, chunk))
        return not self._flow.write_paused

    def write_bare(self, text: str) -> bool:
        if not self._waiting:
            self._batch.schedule()
        data = b"%b%b%b" % (self._before, orjson.dumps(text), self._after)
        self._waiting.append((self._transport, data))
        return not self._flow.write_paused


class _OneWrite:
    """Stands for a transport while what is written goes on together."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()


_NO_END = 1 << 62


class ChunkedBody:
    """What a request's connection knows that ASGI does not tell, and the body of its response:
    one whose headers have been sent, without a content-length.

    It goes in chunks, but to a client of HTTP/1.0, which knows none, as it is: the connection's
    end is its end.
    """

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._batch = batch
        self._is_chunked = cycle.scope["http_version"] != "1.0"
        self._on_lost: Callable[[], None] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the whole request is here."""
        return not self._cycle.more_body

    @property
    def is_lost(self) -> bool:
        """Whether the client has left."""
        return self._cycle.disconnected

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Has `on_lost` called when the client leaves, in the place of what was called before."""
        self._on_lost = on_lost

    def lost(self) -> None:
        """The client has left."""
        if self._on_lost is not None:
            self._on_lost()

    def begin(self) -> None:
        """To be called before the headers are sent."""
        if not self._is_chunked:
            self._cycle.chunked_encoding = False

    @contextmanager
    def in_one_write(self) -> Iterator[None]:
        """What ASGI's `send` writes in here goes to the client in one piece."""
        cycle, transport = self._cycle, self._cycle.transport
        cycle.transport = joined = _OneWrite(transport)  # type: ignore[assignment]
        try:
            yield
        finally:
            cycle.transport = transport
            joined.flush()

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        """Sends a text as JSON between `before` and `after`, soon; it runs for every token.

        It returns False when the client does not keep up: ASGI's `send` waits until it does.
        """
        writer = _TextWriter(self._cycle, self._batch, before, after)
        return writer.write_chunk if self._is_chunked else writer.write_bare

    def flush(self, num_bytes: int, *, is_last: bool) -> None:
        """To be called before ASGI's `send` of so many bytes, so that all keeps its order."""
        self._batch.flush()
        if not self._is_chunked:
            # uvicorn counts what has been announced, and nothing has: more than enough is to
            # come, and behind the last part nothing.
            self._cycle.expected_content_length = num_bytes if is_last else _NO_END
