"""Flow control of what is received (RFC 9113, 5.2): windows that open again in large steps."""

from __future__ import annotations


class ReceiveWindow:
    """What the peer may still send, on a stream or on a connection."""

    __slots__ = ("_num_consumed", "_room", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._room = size
        self._num_consumed = 0
        """Bytes that the peer may send again, and has not been told so."""

    def take(self, num_bytes: int) -> bool:
        """So much has come. Whether there was room for it."""
        self._room -= num_bytes
        return self._room >= 0

    def consumed(self, num_bytes: int) -> int:
        """So much has been dealt with. Returns what the peer is to be told now, or 0.

        Half a window is worth a frame.
        """
        self._num_consumed += num_bytes
        if self._num_consumed < self._size // 2:
            return 0
        increment, self._num_consumed = self._num_consumed, 0
        self._room += increment
        return increment
