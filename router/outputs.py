"""What one request has produced so far, and the clients that follow it.

The request's own task writes; each follower reads at its own pace from the first token on.
One that is slow, or came late, gets what waits in few chunks. gRPC and HTTP both turn
chunks into messages of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2

MAX_TOKENS_PER_CHUNK = 2048
"""With 20 log-probabilities each they stay well under gRPC's usual limit of 4 MiB."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one choice. Without `token_ids` its text comes from another model."""

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

    def __init__(self, choice: int, log: OutputLog) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self._choice = choice
        self._log = log
        self._texts: list[str] = []
        self._logprobs: list[types_pb2.TokenLogprobs] = []
        self._rest = ""

    @property
    def num_pieces(self) -> int:
        return len(self._texts)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED

    def append(
        self, token_id: int, text: str, logprobs: types_pb2.TokenLogprobs | None = None
    ) -> None:
        """Adds one token. Requests have `logprobs` for all tokens or for none."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self.append_text(text)

    def append_text(self, text: str) -> None:
        """Adds a piece of text that has no tokens of this model."""
        if self._log.first_token_at is None:
            self._log.first_token_at = time.monotonic()
        self._texts.append(text)
        self._log.notify()

    def finish(self, reason: types_pb2.FinishReason.ValueType, rest: str = "") -> None:
        """No more tokens will come; `rest` is text that comes after all tokens' text."""
        self.finish_reason = reason
        self._rest = rest
        self._log.notify()

    def since(self, num_sent: int) -> Chunk:
        """What a follower that has `num_sent` pieces gets next: MAX_TOKENS_PER_CHUNK at most."""
        end = self.end_after(num_sent)
        is_last = self.is_finished and end == self.num_pieces
        token_ids = self.token_ids[num_sent:end]
        text = "".join(self._texts[num_sent:end])
        return Chunk(
            choice=self._choice,
            output_index=num_sent if self.token_ids else 0,
            token_ids=token_ids,
            text=text + self._rest if is_last else text,
            logprobs=self._logprobs[num_sent:end],
            finish_reason=self.finish_reason if is_last else types_pb2.FINISH_REASON_UNSPECIFIED,
        )

    def end_after(self, num_sent: int) -> int:
        """How many pieces a follower has after the next chunk."""
        return min(self.num_pieces, num_sent + MAX_TOKENS_PER_CHUNK)


class OutputLog:
    """The outputs of one request with `n` choices."""

    def __init__(self, n: int = 1) -> None:
        self.choices = [ChoiceLog(choice, self) for choice in range(n)]
        self.prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = ()
        """One for each prompt token but the first, before any output; empty if not wanted."""
        self.first_token_at: float | None = None
        """In `time.monotonic`."""
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self._followers: set[Follower] = set()

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def finish(self, outcome: Outcome) -> None:
        """The request has ended well: every choice is finished."""
        self.outcome = outcome
        self.notify()

    def fail(self, error: Exception) -> None:
        """Followers raise `error` after the tokens that are there."""
        self.error = error
        self.notify()

    @contextmanager
    def follow(self) -> Iterator[Follower]:
        """A follower from the first token on; it counts while the context is open."""
        follower = Follower(self)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def notify(self) -> None:
        """Something new can be read."""
        for follower in self._followers:
            follower.wake()


class Follower:
    """One client's way through an output log."""

    def __init__(self, log: OutputLog) -> None:
        self.log = log
        self._num_sent = [0] * len(log.choices)
        self._is_finished = [False] * len(log.choices)
        self._next_choice = 0
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk | None:
        """The next chunk; None when the request has ended well and all of it was read.

        Raises the request's error.
        """
        while True:
            chunk = self._take()
            if chunk is not None:
                return chunk
            if self.log.error is not None:
                raise self.log.error
            if self.log.outcome is not None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    @property
    def is_at_end(self) -> bool:
        """Whether `next` would return None at once."""
        return self.log.outcome is not None and all(self._is_finished)

    def wake(self) -> None:
        """Looks again for what is new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> Chunk | None:
        """Of several choices with news, each gets its turn.

        The very last chunk waits for the outcome, so that both can travel in one message.
        """
        choices = self.log.choices
        has_ended = self.log.outcome is not None or self.log.error is not None
        num_open = self._is_finished.count(False)
        for step in range(len(choices)):
            index = (self._next_choice + step) % len(choices)
            choice, num_sent = choices[index], self._num_sent[index]
            has_news = choice.num_pieces > num_sent or choice.is_finished
            if not has_news or self._is_finished[index]:
                continue
            if choice.is_finished and num_open == 1 and not has_ended:
                continue
            chunk = choice.since(num_sent)
            self._num_sent[index] = choice.end_after(num_sent)
            self._is_finished[index] = bool(chunk.finish_reason)
            self._next_choice = index + 1
            return chunk
        return None
