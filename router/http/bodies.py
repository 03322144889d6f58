"""Bodies of responses on their way to the sockets, past ASGI and its coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

logger = logging.getLogger(__name__)


class WriteBatch:
    """What many responses are to send, written in one go at the end of the loop's turn.

    One write after the other, with nothing computed between, finds the clients awake: waking
    a process costs more than the rest of a write.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[RequestResponseCycle, bytes]] = []
        """In order. Who adds the first one calls `schedule`."""

    def schedule(self) -> None:
        """Has all that waits by then sent when the loop's turn ends."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what waits."""
        waiting = self.waiting.copy()
        self.waiting.clear()
        for cycle, data in waiting:
            if cycle.disconnected:
                continue
            try:
                cycle.transport.write(data)
            except Exception:  # others wait behind it
                logger.exception("a response cannot be written")
                cycle.transport.abort()


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

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        """Sends a text as JSON between `before` and `after`, soon; it runs for every token.

        It returns False when the client does not keep up: ASGI's `send` waits until it does.
        """
        cycle, flow, dumps = self._cycle, self._flow, orjson.dumps
        waiting, schedule = self._batch.waiting, self._batch.schedule
        num_bytes = len(before) + len(after)
        if not self._is_chunked:

            def write_bare(text: str) -> bool:
                if not waiting:
                    schedule()
                waiting.append((cycle, b"%b%b%b" % (before, dumps(text), after)))
                return not flow.write_paused

            return write_bare
        after += b"\r\n"

        def write(text: str) -> bool:
            data = dumps(text)
            if not waiting:
                schedule()
            waiting.append((cycle, b"%x\r\n%b%b%b" % (num_bytes + len(data), before, data, after)))
            return not flow.write_paused

        return write

    def flush(self, num_bytes: int, *, is_last: bool) -> None:
        """To be called before ASGI's `send` of so many bytes, so that all keeps its order."""
        self._batch.flush()
        if not self._is_chunked:
            # uvicorn counts what has been announced, and nothing has: more than enough is to
            # come, and behind the last part nothing.
            self._cycle.expected_content_length = num_bytes if is_last else _NO_END
