"""UCX as the ucxx transport uses it: one worker without busy polling, and its connections.

Everything here belongs to one thread, which sleeps on `fd` whenever `pause_s` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from core.errors import StartupError
from kvtransfer.ucxx_channel import Channel
from kvtransfer.ucxx_library import load_ucxx

BUSY_PAUSE_S = 0.1
"""The longest sleep while something is under way: a safeguard against work that UCX does not
announce, as ucxx's own blocking mode has one."""
CLOSING_PAUSE_S = 0.002
"""The same while a connection is being closed, which UCX never announces."""
CLOSE_TIMEOUT_S = 1.0


class UcxxWorker:
    """`memory` and `host`: what will be sent, and the address that peers reach it at."""

    def __init__(self, memory: str, host: str) -> None:
        """Raises StartupError."""
        self._ucxx = load_ucxx(memory, host)
        api = self._ucxx.api
        features = (api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP)
        try:
            context = api.UCXContext(self._ucxx.settings, feature_flags=features)
            self._worker = api.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except api.UCXError as error:
            raise StartupError(f"transport ucxx: {error}") from error
        self._listener: Any = None
        self._open: list[Channel] = []
        self._closed: list[Channel] = []

    @property
    def fd(self) -> int:
        """Becomes readable when there is work for `progress`."""
        return int(self._worker.epoll_file_descriptor)

    def listen(self, on_connection: Callable[[Channel], None]) -> int:
        """Takes connections on a free port, which it returns. Raises StartupError."""

        def accept(request: int) -> None:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
            on_connection(self._add(endpoint))

        try:
            self._listener = self._ucxx.api.UCXListener.create(self._worker, 0, accept)
        except self._ucxx.api.UCXError as error:
            raise StartupError(f"transport ucxx: cannot listen: {error}") from error
        return int(self._listener.port)

    def connect(self, address: str, port: int) -> Channel:
        """A channel that is not up yet; whether it comes up shows in its use.

        `address` is numeric. Raises ConnectionError.
        """
        api = self._ucxx.api
        try:
            return self._add(api.UCXEndpoint.create(self._worker, address, port, True))
        except api.UCXError as error:
            raise ConnectionError(str(error)) from error

    def close_channel(self, channel: Channel) -> None:
        """Closes it and keeps it until UCX has let go of all memory."""
        if channel in self._open:
            self._open.remove(channel)
            self._closed.append(channel)
            channel.close()

    def progress(self) -> None:
        """Does what there is to do; calls `on_connection`."""
        self._worker.progress()
        self._closed = [channel for channel in self._closed if not channel.is_over]

    def pause_s(self) -> float | None:
        """How long the thread may sleep, if `fd` does not wake it; None: for ever."""
        if not self._worker.arm():
            return 0.0
        if self._closed:
            return CLOSING_PAUSE_S
        return BUSY_PAUSE_S if any(channel.is_busy for channel in self._open) else None

    def close(self) -> None:
        """Frees everything, all channels included."""
        for channel in tuple(self._open):
            self.close_channel(channel)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._closed and time.monotonic() < deadline:
            self.progress()
            time.sleep(CLOSING_PAUSE_S)
        self._listener = None
        self._worker = None

    def _add(self, endpoint: Any) -> Channel:
        channel = Channel(self._ucxx, endpoint)
        self._open.append(channel)
        return channel
