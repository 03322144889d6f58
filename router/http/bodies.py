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
        self._waiting: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, data: bytes) -> None:
        """To be sent soon, in order."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((cycle, data))

    def flush(self) -> None:
        """Sends what waits."""
        waiting, self._waiting = self._waiting, []
        for cycle, data in waiting:
            if cycle.disconnected:
                continue
            try:
                cycle.transport.write(data)
            except Exception:  # others wait behind it
                logger.exception("a response cannot be written")
                cycle.transport.abort()


class ChunkedBody:
    """The body of a response whose headers have been sent, without a content-length.

    It goes in chunks, but to a client of HTTP/1.0, which knows none, as it is: the connection's
    end is its end.
    """

    def __init__(self, cycle: RequestResponseCycle, batch: WriteBatch) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._batch = batch
        self._is_chunked = cycle.scope["http_version"] != "1.0"

    def begin(self) -> None:
        """To be called before the headers are sent."""
        if not self._is_chunked:
            self._cycle.chunked_encoding = False

    def text_writer(self, before: bytes, after: bytes) -> Callable[[str], bool]:
        """Sends a text as JSON between `before` and `after`, soon; it runs for every token.

        It returns False when the client does not keep up: ASGI's `send` waits until it does.
        """
        cycle, flow, add, dumps = self._cycle, self._flow, self._batch.add, orjson.dumps
        num_bytes = len(before) + len(after)
        if not self._is_chunked:

            def write_bare(text: str) -> bool:
                add(cycle, b"%b%b%b" % (before, dumps(text), after))
                return not flow.write_paused

            return write_bare
        after += b"\r\n"

        def write(text: str) -> bool:
            data = dumps(text)
            add(cycle, b"%x\r\n%b%b%b" % (num_bytes + len(data), before, data, after))
            return not flow.write_paused

        return write

    def flush(self, num_bytes: int) -> None:
        """To be called before ASGI's `send` of so many bytes, so that all keeps its order."""
        self._batch.flush()
        if not self._is_chunked:
            # As if that were all that is to come: uvicorn would count what has been announced.
            self._cycle.expected_content_length = num_bytes
