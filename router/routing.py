"""Which workers a request goes to: a pure decision over what is known of each.

Every cost is counted in KV blocks of prompt that a prefill worker computes, so that waiting,
computing, moving and slowing others down can be added up. A request's way is chosen whole:

    handed off   prefill(P) + handoff + transfer_block * lacking(D) + load(D)
    stays on D   queued(D) + work * lacking(D)                      + load(D)

    prefill(P) = queued(P) + work * computed(P) + pull_block * pulled(P)
    load(D)    = sequence * sequences(D) + context_block * context(D)

No term depends on both P and D, so the best pair is the best P joined to the best D, and a
decision takes one pass over the workers of each role.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class RoutingCosts:
    """Weights of the formula, in blocks that a prefill worker computes."""

    work: float = 6.0
    """A block that this request makes a worker compute, next to 1 for a block that waits there
    already: the first delays those who come later, too, and takes room from their prefixes.
    (`RouterSettings.prefix_weight`)"""
    transfer_block: float = 0.05
    """A block moved to decode."""
    handoff: float = 1.0
    """Asking for room, announcing, and releasing, whatever is moved."""
    sequence: float = 8.0
    """A sequence in decode's batch: each slows every step."""
    context_block: float = 0.01
    """A block that decode's sequences hold and every step reads."""
    pull_block: float | None = None
    """A block that prefill takes from another worker instead of computing it; None: it does not."""


@dataclass(slots=True)
class Work:
    """What a worker has to do, or what one request adds to that."""

    queued_blocks: float = 0.0
    """Prompt blocks to compute."""
    sequences: float = 0.0
    """Requests, in whatever phase."""
    context_blocks: float = 0.0
    """Blocks that they hold, or will before they can run."""


@dataclass(slots=True)
class WorkerView:
    """What the router knows of one worker."""

    worker_id: str
    held_blocks: int
    """Leading blocks of the request's prompt that it holds."""
    reported: Work | None
    """By its last report; None when that is too old."""
    predicted: Work
    """What this router has sent that the report cannot know."""
    free_blocks: float | None = None
    """Blocks that a new sequence could take, by the same report."""


@dataclass(frozen=True)
class Prompt:
    """What is asked for. Workers in `avoid` come last."""

    num_blocks: float
    avoid: Collection[str] = ()
    local_blocks: float = 0.0
    """Decode computes the prompt itself when it then has no more than this to compute in all.
    0: never."""


@dataclass(frozen=True)
class Decision:
    """A way, with the terms that led to it."""

    decode: str
    prefill: str | None = None
    """None: the request stays on decode."""
    pull_from: str | None = None
    """Whose prefix prefill shall take over before it computes."""
    computed_blocks: float = 0.0
    held_blocks: float = 0.0
    """Of the worker that computes the prompt."""
    pulled_blocks: float = 0.0
    queued_blocks: float = 0.0
    """Ahead of it, there."""
    lacking_blocks: float = 0.0
    """What decode has not got of the prompt."""
    load: Work = field(default_factory=Work)
    """Of decode."""
    lacks_room: bool = False
    num_suspects: int = 0
    num_ties: int = 1
    """Ways that chance chose from."""

    def formula(self, costs: RoutingCosts) -> str:
        """The cost with its terms filled in."""
        terms = [
            f"{self.queued_blocks:.0f} queued",
            f"{costs.work:g}*{self.computed_blocks:.0f} computed",
        ]
        if self.pull_from is not None:
            terms.append(f"{costs.pull_block:g}*{self.pulled_blocks:.0f} pulled")
        if self.prefill is not None:
            terms.append(f"{costs.handoff:g} handoff")
            terms.append(f"{costs.transfer_block:g}*{self.lacking_blocks:.0f} moved")
        terms.append(f"{costs.sequence:g}*{self.load.sequences:.0f} sequences")
        terms.append(f"{costs.context_block:g}*{self.load.context_blocks:.0f} context")
        return " + ".join(terms)


class Policy(Protocol):
    """A way to choose. Neither list of views may be empty."""

    costs: RoutingCosts

    def choose(
        self, prompt: Prompt, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> Decision: ...


@dataclass
class RoutingCounters:
    """What decisions of one router add up to."""

    decisions: int = 0
    stayed: int = 0
    """Without a prefill worker."""
    with_suspects: int = 0
    without_room: int = 0
    by_chance: int = 0
    """Chance chose among several ways."""
    computed_blocks: float = 0.0
    held_blocks: float = 0.0
    """Of prompts, found where they are computed."""
    lacking_blocks: float = 0.0
    """Of prompts, not found on decode."""
    pulled_blocks: float = 0.0
    """Of prompts, to be taken from another worker."""
    queued_blocks: float = 0.0
    """Ahead of prompts."""

    def count(self, decision: Decision) -> None:
        """One more."""
        self.decisions += 1
        self.stayed += decision.prefill is None
        self.with_suspects += decision.num_suspects > 0
        self.without_room += decision.lacks_room
        self.by_chance += decision.num_ties > 1
        self.computed_blocks += decision.computed_blocks
        self.held_blocks += decision.held_blocks
        self.lacking_blocks += decision.lacking_blocks
        self.pulled_blocks += decision.pulled_blocks
        self.queued_blocks += decision.queued_blocks
