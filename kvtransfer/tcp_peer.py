"""Reader side of the tcp transport: one connection to one peer, and its thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial

from baton.v1 import kv_transfer_pb2
from core.errors import TransferError
from kvtransfer.job_thread import JobThread
from kvtransfer.pulls import ThreadPull
from kvtransfer.tcp_frames import ACCEPTED, receive_into, runs, send_frame, tune

CONNECT_TIMEOUT_S = 5.0


class TcpPeer:
    """Reads blocks of `descriptor` into `memory`, one pull after the other.

    An aborted pull closes the socket, since what was asked for would otherwise still come;
    the next pull connects again. Any other failure leaves the peer unusable.
    """

    def __init__(self, descriptor: kv_transfer_pb2.TransportDescriptor, memory: memoryview) -> None:
        self.num_blocks = descriptor.num_blocks
        self.is_usable = False
        self._descriptor = descriptor
        self._memory = memory
        self._thread = JobThread(f"kv-tcp-read {descriptor.agent}")
        self._connecting = asyncio.Lock()
        # Guards the socket against being closed or replaced while `_cut` shuts it down.
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._reading: ThreadPull | None = None
        self._is_closed = False

    async def connect(self) -> None:
        """Says hello, once however many ask at the same time. Raises TransferError."""
        async with self._connecting:
            if self.is_usable:
                return
            if not self._is_closed and not self._thread.is_running:
                self._thread.start()
            try:
                await self._thread.call(self._open)
            except OSError as error:
                name = self._descriptor.agent
                raise TransferError(f"cannot connect to {name}: {error}") from error
            self.is_usable = True

    def pull(self, pull: ThreadPull) -> None:
        self._thread.post(partial(self._pull, pull))

    def abort(self, pull: ThreadPull) -> None:
        """Settles a read that has not begun; cuts the connection of the one that has."""
        with self._lock:
            if self._reading is pull:
                self._cut()
                return
        pull.settle()

    async def close(self) -> None:
        """Fails what is in flight and waits for the thread."""
        self.is_usable = False
        with self._lock:
            self._is_closed = True
            self._cut()
        if self._thread.is_running:
            self._thread.post(self._drop)
            await self._thread.stop()

    def _pull(self, pull: ThreadPull) -> None:
        try:
            if not pull.is_aborted:
                self._open()
            with self._lock:
                if pull.is_aborted:
                    return  # `abort` has settled it.
                self._reading = pull
            self._read(pull)
            failure = None
        except OSError as error:
            failure = f"reading from {self._descriptor.agent}: {error}"
            self.is_usable = self.is_usable and pull.is_aborted
        finally:
            with self._lock:
                self._reading = None
        if failure is not None or pull.is_aborted:
            # An abort may have cut the connection although the last byte had come by then.
            self._drop()
        pull.settle(failure)

    def _read(self, pull: ThreadPull) -> None:
        assert self._connection is not None
        request = kv_transfer_pb2.KvRead(
            block_ids=[copy.source for copy in pull.copies],
            offset=pull.part.offset,
            num_bytes=pull.part.num_bytes,
        )
        send_frame(self._connection, request)
        destinations = [copy.destination for copy in pull.copies]
        for offset, num_bytes in runs(destinations, self._descriptor.block_bytes, pull.part):
            receive_into(self._connection, self._memory[offset : offset + num_bytes])

    def _open(self) -> None:
        if self._is_closed:
            raise ConnectionError("disconnected")
        if self._connection is not None:
            return
        address = (self._descriptor.host, self._descriptor.port)
        connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
        try:
            tune(connection)
            send_frame(connection, kv_transfer_pb2.KvHello(agent=self._descriptor.agent))
            if connection.recv(len(ACCEPTED)) != ACCEPTED:
                raise ConnectionError("it is not this agent")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._connection = connection
            if self._is_closed:
                self._cut()

    def _cut(self) -> None:
        """Wakes the thread out of a system call on the socket."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
