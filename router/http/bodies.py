"""Bodies of responses on their way to the sockets, past ASGI and its coroutines."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.text_lane import TextBatch, TextLane

logger = logging.getLogger(__name__)


class _BodyLane(TextLane):
    """Texts as JSON between two byte strings, as a part of a response's body."""

    __slots__ = ("_after", "_before", "_flow", "_is_chunked", "_num_bytes", "_transport")

    def __init__(
        self, cycle: RequestResponseCycle, batch: TextBatch, before: bytes, after: bytes
    ) -> None:
        super().__init__(batch)
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._is_chunked = _is_chunked(cycle)
        self._before = before
        self._after = after
        self._num_bytes = len(before) + len(after)

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def send(self, text: str) -> None:
        data = orjson.dumps(text)
        if self._is_chunked:
            size = self._num_bytes + len(data)
            self._transport.write(b"%x\r\n%b%b%b\r\n" % (size, self._before, data, self._after))
        else:
            self._transport.write(b"%b%b%b" % (self._before, data, self._after))

    def failed(self) -> None:
        # Some transports raise when they have been closed, which is no fault.
        if not self._transport.is_closing():
            logger.exception("a response cannot be written")
            self._transport.abort()


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


def _is_chunked(cycle: RequestResponseCycle) -> bool:
    """A client of HTTP/1.0 knows no chunks."""
    return cycle.scope["http_version"] != "1.0"


class ChunkedBody:
    """What a request's connection knows that ASGI does not tell, and the body of its response:
    one whose headers have been sent, without a content-length.

    It goes in chunks, but to a client of HTTP/1.0, which knows none, as it is: the connection's
    end is its end.
    """

    def __init__(self, cycle: RequestResponseCycle, batch: TextBatch) -> None:
        # Which holds this, in its scope: they must not keep each other.
        self._cycle: RequestResponseCycle = weakref.proxy(cycle)
        self._batch = batch
        self._lanes: list[TextLane] = []
        """Those in use: one for each of the prompts whose texts are sent at present."""
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
        if not _is_chunked(self._cycle):
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

    def text_lane(self, before: bytes, after: bytes) -> TextLane:
        """Sends texts as JSON between `before` and `after`.

        When it is full, ASGI's `send` waits until the client keeps up again.
        """
        lane = _BodyLane(self._cycle, self._batch, before, after)
        self._lanes = [*(other for other in self._lanes if other.on_full is not None), lane]
        return lane

    def full(self) -> None:
        """The client does not keep up."""
        for lane in self._lanes:
            if lane.on_full is not None:
                lane.on_full()

    def flush(self, num_bytes: int, *, is_last: bool) -> None:
        """To be called before ASGI's `send` of so many bytes, so that all keeps its order."""
        self._batch.flush()
        if not _is_chunked(self._cycle):
            # uvicorn counts what has been announced, and nothing has: more than enough is to
            # come, and behind the last part nothing.
            self._cycle.expected_content_length = num_bytes if is_last else _NO_END
