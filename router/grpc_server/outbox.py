"""What a connection is to send: gathered for a turn of the event loop, and counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_MAX_BATCH_BYTES = 1 << 18
"""More does not wait for the turn's end, so that a client which reads slowly is noticed."""


class SendBatch:
    """Those with something to send, which they do at the end of the loop's turn.

    So a client gets the tokens of all its streams in one system call, and nothing is computed
    between one client's and the next one's.
    """

    def __init__(self) -> None:
        self._waiting: list[Outbox] = []

    def add(self, outbox: Outbox) -> None:
        """Has `outbox` flushed when the turn ends."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(outbox)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for outbox in waiting:
            outbox.flush()


class Outbox:
    """On its way to one client."""

    def __init__(self, transport: asyncio.Transport, batch: SendBatch) -> None:
        self._transport = transport
        self._batch = batch
        self._out: list[bytes] = []
        self._num_out_bytes = 0
        self._is_closed = False
        self._num_written_bytes = 0
        """Of everything, since the beginning."""
        self._num_unsent_bytes = 0
        """Of these, which waited in the process at the last look."""
        self._num_taken_bytes = 0
        """Of these, which did not."""

    def send(self, data: bytes) -> None:
        """Sends `data` at the end of the turn, in order."""
        if not self._out:
            self._batch.add(self)
        self._out.append(data)
        self._num_out_bytes += len(data)
        if self._num_out_bytes >= _MAX_BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what waits."""
        out, self._out, self._num_out_bytes = self._out, [], 0
        if out and not self._is_closed and not self._transport.is_closing():
            data = b"".join(out)
            self._num_written_bytes += len(data)
            self._transport.write(data)

    def close(self) -> None:
        """Sends what waits, and tells the client that nothing follows."""
        self.flush()
        self._is_closed = True
        if not self._transport.is_closing():
            # The client may have left: asyncio's own loop raises what uvloop keeps to itself.
            with suppress(OSError):
                self._transport.write_eof()

    def look(self) -> None:
        """Notes how much the client has taken, for `has_taken`."""
        self._num_unsent_bytes = self._transport.get_write_buffer_size()
        self._num_taken_bytes = self._num_written_bytes - self._num_unsent_bytes

    def has_taken(self) -> bool:
        """Whether the client has read something since the last look.

        It has if the system, which could take no more then, has taken more since.
        """
        num_bytes = self._num_written_bytes - self._transport.get_write_buffer_size()
        return self._num_unsent_bytes > 0 and num_bytes > self._num_taken_bytes
