"""One connection of the ucxx transport: frames both ways, and blocks as tagged messages.

Frames go over UCX's stream, which keeps connections apart. Tags are shared by all connections
of a process, so the reader chooses them. Everything here belongs to one thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from google.protobuf.message import Message

from kvtransfer.send_receive import LENGTH_BYTES, frame, payload_length
from kvtransfer.ucxx_library import Ucxx


class Operations:
    """UCX's operations in the order in which they were begun.

    They are kept until they are over: letting go of ucxx's handle would cancel one.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        """Why the first one failed that did."""
        self._pending: deque[tuple[Any, Any]] = deque()

    def add(self, request: Any, buffer: object = None) -> None:
        """`buffer`: memory that nobody else keeps alive meanwhile."""
        self._pending.append((request, buffer))

    def are_over(self) -> bool:
        """Whether UCX touches the memory of none of them any more."""
        while self._pending and self._pending[0][0].completed:
            request, _ = self._pending.popleft()
            try:
                request.check_error()
            except Exception as error:
                self.failure = self.failure or str(error)
        return not self._pending

    def have_succeeded(self) -> bool:
        """Whether they are over and none has failed."""
        return self.are_over() and self.failure is None


class Channel:
    """A connection to a peer that may go away; all of its faults are ConnectionErrors.

    Blocks go one way only and one batch at a time: the owner sends, the reader receives.
    """

    def __init__(self, ucxx: Ucxx, endpoint: Any) -> None:
        self._ucxx = ucxx
        self._endpoint = endpoint
        self._outgoing = Operations()
        self._incoming = Operations()
        self.blocks = Operations()
        self._expect(LENGTH_BYTES, is_length=True)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way that takes two."""
        return not (self._outgoing.are_over() and self.blocks.are_over())

    @property
    def is_over(self) -> bool:
        """After `close`: whether UCX has let go of all memory."""
        return not self.is_busy and self._incoming.are_over()

    def check(self) -> None:
        """Raises ConnectionError when the peer is gone or an operation failed."""
        with self._faults_translated():
            self._endpoint.raise_on_error()
        for operations in (self._incoming, self._outgoing, self.blocks):
            operations.are_over()
            if operations.failure is not None:
                raise ConnectionError(operations.failure)

    def send(self, message: Message) -> None:
        """Sends one frame."""
        array = self._ucxx.array(frame(message))
        with self._faults_translated():
            self._outgoing.add(self._endpoint.stream_send(array), array)

    def receive(self) -> bytearray | None:
        """What is in the next frame, once all of it has come."""
        while self._incoming.are_over():
            self.check()
            received = self._received
            if not self._is_length:
                self._expect(LENGTH_BYTES, is_length=True)
                return received
            self._expect(payload_length(received), is_length=False)
        return None

    def send_blocks(self, blocks: Iterable[memoryview], tag: int) -> None:
        """Sends each as one message from where it is."""
        self._begin(self._endpoint.tag_send, blocks, tag)

    def receive_blocks(self, blocks: Iterable[memoryview], tag: int) -> None:
        """Receives one message into each; to be called before the peer may send."""
        self._begin(self._endpoint.tag_recv, blocks, tag)

    def close(self) -> None:
        """Tells the peer, and gives up all that is under way; `is_over` tells when it was."""
        self._endpoint.close_blocking()

    def _begin(
        self, operation: Callable[[Any, Any], Any], blocks: Iterable[memoryview], tag: int
    ) -> None:
        assert self.blocks.are_over(), "the former batch is not over"
        self.blocks = Operations()
        ucxx_tag = self._ucxx.api.UCXXTag(tag)
        with self._faults_translated():
            for block in blocks:
                self.blocks.add(operation(self._ucxx.array(block), ucxx_tag))

    def _expect(self, num_bytes: int, is_length: bool) -> None:
        """Receives the length of a frame, or the rest of it."""
        self._received = bytearray(num_bytes)
        self._is_length = is_length
        array = self._ucxx.array(self._received)
        with self._faults_translated():
            self._incoming.add(self._endpoint.stream_recv(array), array)

    @contextlib.contextmanager
    def _faults_translated(self) -> Iterator[None]:
        try:
            yield
        except self._ucxx.api.UCXError as error:
            raise ConnectionError(str(error)) from error
