"""What one request has produced so far, and the streams that follow it.

The request's own task appends; each subscriber reads at its own pace from the first token
on. A subscriber that is slow, or came late, gets what waits in few messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from baton.v1 import inference_pb2, types_pb2

MAX_TOKENS_PER_MESSAGE = 2048
"""With 20 log-probabilities each they stay well under gRPC's usual limit of 4 MiB."""


class OutputLog:
    """Tokens of one request with the text and log-probabilities that belong to them."""

    def __init__(self, request_id: str) -> None:
        self.token_ids: list[int] = []
        self._request_id = request_id
        self._texts: list[str] = []
        self._logprobs: list[types_pb2.TokenLogprobs] = []
        self._last_message: inference_pb2.GenerateResponse | None = None
        self._error: Exception | None = None
        self._wakeups: set[asyncio.Event] = set()

    @property
    def num_subscribers(self) -> int:
        return len(self._wakeups)

    @property
    def is_finished(self) -> bool:
        """Whether it ended with a finish reason."""
        return self._last_message is not None

    def append(
        self, token_id: int, text: str, logprobs: types_pb2.TokenLogprobs | None = None
    ) -> None:
        """Adds one token. Requests have `logprobs` for all tokens or for none."""
        self.token_ids.append(token_id)
        self._texts.append(text)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._notify()

    def finish(self, last_message: inference_pb2.GenerateResponse) -> None:
        """Ends every stream with `last_message`; its text comes after all tokens' text."""
        self._last_message = last_message
        self._notify()

    def fail(self, error: Exception) -> None:
        """Ends every stream by raising `error`, after the tokens that are there."""
        self._error = error
        self._notify()

    @contextmanager
    def subscribe(self) -> Iterator[AsyncIterator[inference_pb2.GenerateResponse]]:
        """A stream from the first token to the end; counts as subscriber while it is open."""
        wakeup = asyncio.Event()
        wakeup.set()
        self._wakeups.add(wakeup)
        try:
            yield self._follow(wakeup)
        finally:
            self._wakeups.discard(wakeup)

    async def _follow(self, wakeup: asyncio.Event) -> AsyncIterator[inference_pb2.GenerateResponse]:
        num_sent = 0
        while True:
            await wakeup.wait()
            wakeup.clear()
            while len(self.token_ids) - num_sent > MAX_TOKENS_PER_MESSAGE:
                yield self._message(num_sent, num_sent + MAX_TOKENS_PER_MESSAGE)
                num_sent += MAX_TOKENS_PER_MESSAGE
            message = self._message(num_sent, len(self.token_ids))
            num_sent = len(self.token_ids)
            if self._last_message is not None:
                text = message.text + self._last_message.text
                message.MergeFrom(self._last_message)
                message.text = text
                yield message
                return
            if message.token_ids:
                yield message
            if self._error is not None and num_sent == len(self.token_ids):
                raise self._error

    def _message(self, start: int, end: int) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            request_id=self._request_id,
            text="".join(self._texts[start:end]),
            token_ids=self.token_ids[start:end],
            output_index=start,
            logprobs=self._logprobs[start:end],
        )

    def _notify(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()
