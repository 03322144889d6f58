"""What a prefill worker keeps of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import worker_pb2
from core.sampling import SamplingParams
from core.tracing import NO_SPAN, Span
from engine.batch import Logprobs
from engine.sequence import Sequence
from kvtransfer.link import LinkEstimate
from kvtransfer.peers import Peer
from prefill_svc.gate import Ticket
from prefill_svc.progress import ProgressQueue
from worker.requests import RequestKey


@dataclass(eq=False)
class Prompt:
    """State of one request."""

    dispatch: worker_pb2.Dispatch
    decode: worker_pb2.WorkerAddress
    sequence: Sequence
    """Ends with its first token, whatever the client's limits."""
    sampling: SamplingParams
    """With the client's own limits."""
    ticket: Ticket
    num_uncached: int
    """Tokens to compute, as it seemed when the prompt came, or its prefix was fetched."""
    span: Span
    phase: Span = NO_SPAN
    """Of what happens now: it waits to be computed, or is."""
    source: worker_pb2.PrefixSource | None = None
    """Who seems to hold more of it than this worker."""
    block_ids: list[int] = field(default_factory=list)
    progress: ProgressQueue = field(default_factory=ProgressQueue)
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of the prompt's tokens so far, where asked for."""
    peer: Peer | None = None
    link: LinkEstimate | None = None
    """What decode has measured of the way to it."""
    asked_at: float | None = None
    """When decode was asked for the grant that is still to come."""
    is_known_to_decode: bool = False
    is_released: bool = False
    """Decode has read everything under the lease: from now on it needs nothing from here."""

    @property
    def key(self) -> RequestKey:
        return self.sequence.request_key

    def begin_compute(self) -> None:
        """The engine has given it its blocks."""
        self.phase.end()
        self.phase = self.span.child(
            "prefill.compute", {"baton.cached_tokens": self.sequence.num_cached_tokens}
        )

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute."""
        if not self.block_ids:
            return self.num_uncached
        return self.sequence.num_tokens - self.sequence.num_computed_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the prompt's own log-probabilities are asked for."""
        return self.sequence.num_prompt_logprobs is not None
