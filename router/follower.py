"""One client that follows a request's outputs, at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import BatonError
from router.text_lane import TextLane

if TYPE_CHECKING:
    from router.outputs import ChoiceLog, Chunk, OutputLog

MAX_TOKENS_PER_CHUNK = 2048
"""With 20 log-probabilities each they stay well under gRPC's usual limit of 4 MiB."""

READ_GRACE_S = 5.0
"""So long after its deadline a reply waits for a client that does not read."""

WriteTokens = Callable[[int, Sequence[int], str], bool]
"""Sends output index, tokens from there on, and their text; returns whether the client takes more
at once."""


class Follower:
    """One client's way through an output log: it pulls with `next`, or has tokens pushed to it."""

    __slots__ = ("_error", "_idle_since", "_lane", "_open", "_waiter", "_write_tokens", "log")

    def __init__(self, log: OutputLog) -> None:
        self.log = log
        self._open = [_Cursor(choice) for choice in log.choices]
        """Choices of which not all was read; the first has its turn next."""
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lane: TextLane | None = None
        self._write_tokens: WriteTokens | None = None
        self._idle_since: float | None = time.monotonic()

    def unread_s(self, now: float) -> float:
        """For how long (`time.monotonic`) the client has left unread what waits for it."""
        if self._idle_since is None or not self._has_news():
            return 0.0
        return now - self._idle_since

    async def next(self) -> Chunk | None:
        """The next chunk; None when the request has ended well and all of it was read.

        Raises the request's error, or this follower's own.
        """
        self._idle_since = None
        while True:
            chunk = self._take()
            if chunk is not None:
                self._idle_since = time.monotonic()
                return chunk
            error = self.log.error or self._error
            if error is not None:
                raise error.bare()
            if self.log.outcome is not None:
                return None
            await self._wait()

    async def push_text(self, lane: TextLane) -> None:
        """Sends each token's text down `lane` in the moment in which it comes: no task is woken.

        Returns where `next` has to go on: when the lane is full, and when the end or an error
        has come; at once if the request has several choices.
        """
        self._lane, lane.on_full = lane, self._has_enough
        try:
            await self._push_all()
        finally:
            lane.on_full = None

    async def push_tokens(self, write: WriteTokens) -> None:
        """As `push_text`, for who wants tokens, too; those without text are written as well.
        Raises what `write` raises."""
        self._write_tokens = write
        await self._push_all()

    async def _push_all(self) -> None:
        self._idle_since = None
        try:
            if self._open and len(self.log.choices) == 1 and self._push():
                if self._lane is not None and len(self.log.followers) == 1:
                    self._open[0].choice.push_to(self, self._lane)
                await self._wait()
        finally:
            self.log.choices[0].end_pushing()
            self._lane = self._write_tokens = None
            self._idle_since = time.monotonic()

    def fail(self, error: BatonError) -> None:
        """`next` raises `error` after what is there; the request goes on."""
        self._error = error
        self.wake()

    @property
    def is_at_end(self) -> bool:
        """Whether `next` would return None at once."""
        return not self._open and self.log.outcome is not None

    def wake(self) -> None:
        """Looks again for what is new."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            if not self._push():
                waiter.set_result(None)
        except Exception as error:  # the client's connection has failed, not the request
            waiter.set_exception(error)

    def has_read(self, num_pieces: int) -> None:
        """So many pieces have been written for it."""
        self._open[0].num_sent = num_pieces

    def _has_enough(self) -> None:
        """It wants no more pushed for now."""
        self.log.choices[0].end_pushing()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _push(self) -> bool:
        """Writes what is there. Whether more may be pushed later."""
        lane, write_tokens = self._lane, self._write_tokens
        if lane is None and write_tokens is None:
            return False
        cursor = self._open[0]
        choice = cursor.choice
        if choice.is_finished or self.log.error is not None or self._error is not None:
            return False
        texts = choice.texts
        if len(texts) - cursor.num_sent > MAX_TOKENS_PER_CHUNK:
            return False
        num_sent, cursor.num_sent = cursor.num_sent, len(texts)
        text = texts[-1] if len(texts) == num_sent + 1 else "".join(texts[num_sent:])
        if lane is not None:
            if text:
                lane.put(text)
            return not lane.is_full
        if num_sent == len(texts):
            return True
        token_ids = choice.token_ids
        assert write_tokens is not None
        return write_tokens(num_sent if token_ids else 0, token_ids[num_sent:], text)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _has_news(self) -> bool:
        return any(
            cursor.choice.is_finished or cursor.choice.num_pieces > cursor.num_sent
            for cursor in self._open
        )

    def _take(self) -> Chunk | None:
        """Of several choices with news, each gets its turn.

        The very last chunk waits for the outcome, so that both can travel in one message.
        """
        is_last = len(self._open) == 1
        for index, cursor in enumerate(self._open):
            choice = cursor.choice
            if choice.is_finished:
                if is_last and self.log.outcome is None and self.log.error is None:
                    continue
            elif choice.num_pieces == cursor.num_sent:
                continue
            chunk = choice.since(cursor.num_sent)
            cursor.num_sent = choice.end_after(cursor.num_sent)
            if chunk.finish_reason:
                del self._open[index]
            elif not is_last:
                self._open.append(self._open.pop(index))
            return chunk
        return None


@dataclass(slots=True)
class _Cursor:
    """How far a follower has read one choice."""

    choice: ChoiceLog
    num_sent: int = 0
