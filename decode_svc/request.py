"""What a decode worker keeps of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.v1 import kv_transfer_pb2, worker_pb2
from engine.batch import SequenceUpdate
from engine.sequence import Sequence
from kvtransfer.base import BlockCopy, BlockPart
from kvtransfer.digests import DigestPlan
from kvtransfer.peers import Peer
from worker.requests import RequestKey


@dataclass(frozen=True)
class News:
    """One announcement: what to read, and the message itself."""

    copies: list[BlockCopy]
    part: BlockPart | None
    message: kv_transfer_pb2.AnnounceRequest


@dataclass(eq=False)
class Request:
    """State of one request."""

    dispatch: worker_pb2.Dispatch
    prefill: Peer | None
    """None: the prompt is computed here."""
    prompt: Sequence
    """What all choices begin with; in the engine itself only when it is computed here."""
    digest_plan: DigestPlan
    num_missing_blocks: int
    """Blocks that it needs and the cache had not, when it came."""
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Set when every choice has ended, or to the error that ended them."""
    running: dict[int, Sequence] = field(default_factory=dict)
    """The choices in the engine, from the commit on."""
    cancelled: set[int] = field(default_factory=set)
    """Choices that were aborted alone, before the commit."""
    is_committed: bool = False
    num_pulled: int = 0
    is_released: bool = False
    first_damaged: int | None = None
    """Index of the first block that differed from what prefill computed."""

    @property
    def key(self) -> RequestKey:
        return self.prompt.request_key

    @property
    def peer(self) -> Peer:
        """Of a request that is handed off."""
        assert self.prefill is not None, "computed here"
        return self.prefill

    @property
    def num_choices(self) -> int:
        return max(1, self.dispatch.n)

    def says_only_token(self, update: SequenceUpdate) -> bool:
        """Whether there is nothing to say but one more token of a sequence that has begun."""
        if update.token is None or update.token.logprobs or update.finish_reason is not None:
            return False
        is_computed_here = self.prefill is None
        return not (is_computed_here and update.output_index == self.prompt.num_prior_outputs)

    def end_choice(self, choice: int) -> None:
        """One of the running choices has ended, with the last of them the request."""
        self.running.pop(choice, None)
        if not self.running:
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """The request is over. Nothing when the task was cancelled meanwhile."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
