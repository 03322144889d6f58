"""What one request has produced so far, and the clients that follow it.

The request's own task writes; each follower reads at its own pace from the first token on.
One that is slow, or came late, gets what waits in few chunks. gRPC and HTTP both turn
chunks into messages of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from baton.v1 import inference_pb2, types_pb2

MAX_TOKENS_PER_CHUNK = 2048
"""With 20 log-probabilities each they stay well under gRPC's usual limit of 4 MiB."""

READ_GRACE_S = 5.0
"""So long after its deadline a reply waits for a client that does not read."""


class Chunk(NamedTuple):
    """New output of one choice. Without `token_ids` its text comes from another model.

    One is made for every token, so it is the cheapest kind of record.
    """

    choice: int
    output_index: int
    """Index among the choice's output tokens of `token_ids[0]`."""
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[types_pb2.TokenLogprobs]
    """One for each token, or none at all."""
    finish_reason: types_pb2.FinishReason.ValueType
    """Set in the choice's last chunk."""


@dataclass(frozen=True)
class Outcome:
    """What is known when the whole request has ended well."""

    usage: inference_pb2.Usage
    route: inference_pb2.Route
    timing: inference_pb2.Timing


class ChoiceLog:
    """Pieces of one choice: tokens, each with its text and log-probabilities, or text alone.

    A choice has all of its pieces of one kind.
    """

    __slots__ = (
        "_choice",
        "_followers",
        "_log",
        "_logprobs",
        "_pushed",
        "_rest",
        "_write",
        "finish_reason",
        "is_finished",
        "texts",
        "token_ids",
    )

    def __init__(self, choice: int, log: OutputLog) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self.is_finished = False
        self._choice = choice
        self._log = log
        self._followers = log.followers
        self._logprobs: list[types_pb2.TokenLogprobs] = []
        self._rest = ""
        self._pushed: Follower | None = None
        self._write: WriteText | None = None

    @property
    def num_pieces(self) -> int:
        """Tokens, or pieces of another model's text."""
        return len(self.texts)

    def append(
        self,
        token_id: int,
        text: str,
        logprobs: types_pb2.TokenLogprobs | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Adds one token. Requests have `logprobs` for all tokens or for none.

        The last one is shown to followers when `finish` is called, right after this.
        """
        if is_last:
            self.end_pushing()
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if not self.texts:
            self._log.note_first_token()
        self.texts.append(text)
        write = self._write
        if write is not None:
            if text:
                self._write_now(write, text)
        elif not is_last:
            for follower in self._followers:
                follower.wake()

    def append_text(self, text: str) -> None:
        """Adds a piece of text that has no tokens of this model."""
        self.end_pushing()
        if not self.texts:
            self._log.note_first_token()
        self.texts.append(text)
        self._log.notify()

    def finish(self, reason: types_pb2.FinishReason.ValueType, rest: str = "") -> None:
        """No more tokens will come; `rest` is text that comes after all tokens' text."""
        self.finish_reason = reason
        self.is_finished = True
        self._rest = rest
        self._log.notify()

    def push_to(self, follower: Follower, write: WriteText) -> None:
        """Has each further token's text written for `follower`, which is the only one and has
        read all that is there. It is not asked again until `end_pushing`."""
        self._pushed, self._write = follower, write

    def end_pushing(self) -> None:
        """The follower takes what comes from now on; a no-op when nothing is pushed."""
        if self._pushed is not None:
            self._pushed.has_read(self.num_pieces)
            self._pushed = self._write = None

    def _write_now(self, write: WriteText, text: str) -> None:
        follower = self._pushed
        assert follower is not None
        try:
            if write(text):
                return
        except Exception as error:  # the client's connection has failed, not the request
            follower.has_failed(error)
        else:
            follower.has_enough()
        self.end_pushing()

    def since(self, num_sent: int) -> Chunk:
        """What a follower that has `num_sent` pieces gets next: MAX_TOKENS_PER_CHUNK at most."""
        num_pieces = len(self.texts)
        if num_pieces == num_sent + 1 and not (self.is_finished or self._logprobs):
            # Nearly every chunk: one token, which its reader takes as soon as it comes.
            reason = types_pb2.FINISH_REASON_UNSPECIFIED
            first = num_sent if self.token_ids else 0
            return Chunk(
                self._choice, first, self.token_ids[num_sent:], self.texts[num_sent], (), reason
            )
        end = min(num_pieces, num_sent + MAX_TOKENS_PER_CHUNK)
        texts = self.texts[num_sent:end]
        text = texts[0] if len(texts) == 1 else "".join(texts)
        reason = types_pb2.FINISH_REASON_UNSPECIFIED
        if self.is_finished and end == num_pieces:
            text += self._rest
            reason = self.finish_reason
        return Chunk(
            self._choice,
            num_sent if self.token_ids else 0,
            self.token_ids[num_sent:end],
            text,
            self._logprobs[num_sent:end] if self._logprobs else (),
            reason,
        )

    def end_after(self, num_sent: int) -> int:
        """How many pieces a follower has after the next chunk."""
        return min(self.num_pieces, num_sent + MAX_TOKENS_PER_CHUNK)


class OutputLog:
    """The outputs of one request with `n` choices."""

    def __init__(self, n: int = 1) -> None:
        self.followers: set[Follower] = set()
        self.choices = [ChoiceLog(choice, self) for choice in range(n)]
        self.prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = ()
        """One for each prompt token but the first, before any output; empty if not wanted."""
        self.first_token_at: float | None = None
        """In `time.monotonic`."""
        self.outcome: Outcome | None = None
        self.error: Exception | None = None

    @property
    def num_followers(self) -> int:
        return len(self.followers)

    def unread_s(self, now: float) -> float:
        """For how long no follower has read although there was something; 0 without any."""
        return min((follower.unread_s(now) for follower in self.followers), default=0.0)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def finish(self, outcome: Outcome) -> None:
        """The request has ended well: every choice is finished."""
        self.outcome = outcome
        self.notify()

    def fail(self, error: Exception) -> None:
        """Followers raise `error` after the tokens that are there; the first one counts."""
        self.error = self.error or error
        self.notify()

    @contextmanager
    def follow(self) -> Iterator[Follower]:
        """A follower from the first token on; it counts while the context is open."""
        for choice in self.choices:
            choice.end_pushing()
        follower = Follower(self)
        self.followers.add(follower)
        try:
            yield follower
        finally:
            self.followers.discard(follower)

    def note_first_token(self) -> None:
        """A choice gets its first token; the request's first counts."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()

    def notify(self) -> None:
        """Something new can be read."""
        for follower in self.followers:
            follower.wake()


WriteText = Callable[[str], bool]
"""Sends a text that is not empty; returns whether the client takes more at once."""

WriteTokens = Callable[[int, Sequence[int], str], bool]
"""Sends output index, tokens from there on, and their text; returns as WriteText does."""


class Follower:
    """One client's way through an output log: it pulls with `next`, or has tokens pushed to it."""

    __slots__ = ("_error", "_idle_since", "_open", "_waiter", "_write_text", "_write_tokens", "log")

    def __init__(self, log: OutputLog) -> None:
        self.log = log
        self._open = [_Cursor(choice) for choice in log.choices]
        """Choices of which not all was read; the first has its turn next."""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._write_text: WriteText | None = None
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
                raise error
            if self.log.outcome is not None:
                return None
            await self._wait()

    async def push_text(self, write: WriteText) -> None:
        """Gives each token's text to `write` in the moment in which it comes: no task is woken.

        Returns where `next` has to go on: when `write` says that it wants no more for now, and
        when the end or an error has come; at once if the request has several choices. Raises
        what `write` raises.
        """
        self._write_text = write
        await self._push_all()

    async def push_tokens(self, write: WriteTokens) -> None:
        """As `push_text`, for who wants tokens, too; those without text are written as well."""
        self._write_tokens = write
        await self._push_all()

    async def _push_all(self) -> None:
        self._idle_since = None
        try:
            if self._open and len(self.log.choices) == 1 and self._push():
                if self._write_text is not None and len(self.log.followers) == 1:
                    self._open[0].choice.push_to(self, self._write_text)
                await self._wait()
        finally:
            self.log.choices[0].end_pushing()
            self._write_text = self._write_tokens = None
            self._idle_since = time.monotonic()

    def fail(self, error: Exception) -> None:
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

    def has_enough(self) -> None:
        """It wants no more pushed for now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def has_failed(self, error: Exception) -> None:
        """Nothing can be written for it: what pushes raises `error`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _push(self) -> bool:
        """Writes what is there. Whether more may be pushed later."""
        write_text, write_tokens = self._write_text, self._write_tokens
        if write_text is None and write_tokens is None:
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
        if write_text is not None:
            return not text or write_text(text)
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
