"""What one request has produced so far, and the clients that follow it.

The request's own task writes; each follower (router/follower.py) reads at its own pace from the
first token on. One that is slow, or came late, gets what waits in few chunks. gRPC and HTTP both
turn chunks into messages of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from baton.v1 import inference_pb2, types_pb2
from core.errors import BatonError
from router.follower import MAX_TOKENS_PER_CHUNK, Follower
from router.text_lane import TextLane


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


class Followers(set["Follower"]):
    """Those of one request."""

    __slots__ = ()

    def wake(self) -> None:
        """Something new can be read."""
        for follower in self:
            follower.wake()


class ChoiceLog:
    """Pieces of one choice: tokens, each with its text and log-probabilities, or text alone.

    A choice has all of its pieces of one kind.
    """

    __slots__ = (
        "_choice",
        "_followers",
        "_logprobs",
        "_pushed",
        "_rest",
        "finish_reason",
        "first_token_at",
        "is_finished",
        "lane",
        "texts",
        "token_ids",
    )

    def __init__(self, choice: int, followers: Followers) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self.is_finished = False
        self.first_token_at: float | None = None
        """In `time.monotonic`."""
        self._choice = choice
        # Not the log: the two would hold each other, and all of these texts, until the garbage
        # collector looks at old objects, which it seldom does.
        self._followers = followers
        self._logprobs: list[types_pb2.TokenLogprobs] = []
        self._rest = ""
        self._pushed: Follower | None = None
        self.lane: TextLane | None = None
        """While it is there, tokens with text and nothing else go to `push`."""

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
            self.first_token_at = time.monotonic()
        self.texts.append(text)
        if self.lane is not None:
            if text:
                self.lane.put(text)
        elif not is_last:
            self._followers.wake()

    def push(self, lane: TextLane, token_id: int, text: str) -> None:
        """`append` for a token that is not the last one, while there is a `lane`."""
        self.token_ids.append(token_id)
        self.texts.append(text)
        lane.put(text)

    def append_text(self, text: str) -> None:
        """Adds a piece of text that has no tokens of this model."""
        self.end_pushing()
        if not self.texts:
            self.first_token_at = time.monotonic()
        self.texts.append(text)
        self._followers.wake()

    def finish(self, reason: types_pb2.FinishReason.ValueType, rest: str = "") -> None:
        """No more tokens will come; `rest` is text that comes after all tokens' text."""
        self.finish_reason = reason
        self.is_finished = True
        self._rest = rest
        self._followers.wake()

    def push_to(self, follower: Follower, lane: TextLane) -> None:
        """Has each further token's text sent down `lane` for `follower`, which is the only one
        and has read all that is there. It is not asked again until `end_pushing`."""
        self._pushed, self.lane = follower, lane

    def end_pushing(self) -> None:
        """The follower takes what comes from now on; a no-op when nothing is pushed."""
        if self._pushed is not None:
            self._pushed.has_read(self.num_pieces)
            self._pushed = self.lane = None

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
        self.followers = Followers()
        self.choices = [ChoiceLog(choice, self.followers) for choice in range(n)]
        self.prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = ()
        """One for each prompt token but the first, before any output; empty if not wanted."""
        self.outcome: Outcome | None = None
        self.error: BatonError | None = None

    @property
    def first_token_at(self) -> float | None:
        """When the first token of any choice came, in `time.monotonic`."""
        found = (choice.first_token_at for choice in self.choices)
        return min((at for at in found if at is not None), default=None)

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
        self.followers.wake()

    def fail(self, error: BatonError) -> None:
        """Followers raise `error` after the tokens that are there; the first one counts."""
        self.error = self.error or error.bare()
        self.followers.wake()

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
