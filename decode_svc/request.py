"""What a decode worker keeps of one request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.v1 import kv_transfer_pb2, worker_pb2
from core.tracing import Span
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
    span: Span
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
    num_outputs: int = 0
    """Tokens of choices that have ended here, prefill's first ones among them."""
    end_reasons: list[str] = field(default_factory=list)
    """Of choices that have ended here: why."""
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

    def end_choice(self, choice: int, reason: str) -> None:
        """One of the running choices has ended, with the last of them the request."""
        sequence = self.running.pop(choice, None)
        if sequence is not None:
            self.num_outputs += _num_outputs(sequence)
            self.end_reasons.append(reason)
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

    def end_generating(self, span: Span) -> None:
        """Tells what has come of the choices, those that still run among them."""
        running = sum(map(_num_outputs, self.running.values()))
        span.set(
            {
                "baton.output_tokens": self.num_outputs + running,
                "baton.end_reasons": self.end_reasons,
            }
        )


def _num_outputs(sequence: Sequence) -> int:
    return len(sequence.output_token_ids) - sequence.num_prior_outputs
