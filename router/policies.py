"""The policies that choose workers by the terms of `routing`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from router.prefill_shares import PrefillShares
from router.routing import Decision, Policy, Prompt, RoutingCosts, Work, WorkerView

PolicyName = Literal["kv_aware", "least_loaded", "round_robin"]

MIN_PULLED_BLOCKS = 4
"""Fewer are computed about as soon as another worker is asked for them."""
TIE_TOLERANCE = 0.01
"""Costs that differ by no more than this share of the least count as equal."""


def make_policy(name: PolicyName, costs: RoutingCosts, rng: random.Random) -> Policy:
    """The policy of that name. Each router has one of its own."""
    if name == "round_robin":
        return RoundRobin(costs)
    return CostPolicy(costs, rng, uses_prefixes=name == "kv_aware")


@dataclass(slots=True)
class _Option:
    """A worker as a part of the way."""

    view: WorkerView
    work: Work
    """Reported and predicted."""
    num_suspects: int
    cost: float
    scale: float
    """The part of the cost that is the worker's own, to which a tie is relative."""
    lacks_room: bool = False
    stays: bool = False


class CostPolicy:
    """Takes the way of least cost, and chance among near ties.

    Workers known to lack room come after those that have it, suspects after all others. What
    a prefill worker holds does not count while it has computed more than its share.
    Without `uses_prefixes` only load counts, and no request stays on decode.
    """

    def __init__(
        self, costs: RoutingCosts, rng: random.Random, *, uses_prefixes: bool = True
    ) -> None:
        self.costs = costs
        self._rng = rng
        self._uses_prefixes = uses_prefixes
        self._shares = PrefillShares()

    def choose(
        self, prompt: Prompt, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> Decision:
        """One way, in time proportional to the number of workers."""
        source = self._source(prompt, [*prefills, *decodes])
        longest = 0 if source is None else source.held_blocks
        prefill, num_prefill_ties = self._least(self._prefill_options(prompt, prefills, longest))
        decode, num_ties = self._least(self._decode_options(prompt, decodes, prefill))
        computing = decode if decode.stays else prefill
        missing = _missing(prompt, computing.view)
        pulled = 0 if decode.stays else _pulled(prefill.view, longest)
        if not decode.stays:
            self._shares.add(prefill.view.worker_id, missing - pulled)
        return Decision(
            decode=decode.view.worker_id,
            prefill=None if decode.stays else prefill.view.worker_id,
            pull_from=source.worker_id if source is not None and pulled else None,
            computed_blocks=missing - pulled,
            pulled_blocks=pulled,
            held_blocks=prompt.num_blocks - missing,
            queued_blocks=computing.work.queued_blocks,
            lacking_blocks=_missing(prompt, decode.view),
            load=decode.work,
            lacks_room=decode.lacks_room,
            num_suspects=decode.num_suspects,
            num_ties=num_ties if decode.stays else num_ties * num_prefill_ties,
        )

    def _source(self, prompt: Prompt, views: Sequence[WorkerView]) -> WorkerView | None:
        """One of those that hold the most of the prompt; None when prefill is not to ask it."""
        if self.costs.pull_block is None:
            return None
        trusted = [view for view in views if view.worker_id not in prompt.avoid]
        longest = max((view.held_blocks for view in trusted), default=0)
        if longest == 0:
            return None
        return self._rng.choice([view for view in trusted if view.held_blocks == longest])

    def _prefill_options(
        self, prompt: Prompt, views: Sequence[WorkerView], longest: int
    ) -> list[_Option]:
        options = []
        exceeding = self._shares.exceeding([view.worker_id for view in views])
        for view, work in zip(views, _totals(views), strict=True):
            cost = work.queued_blocks
            if self._uses_prefixes:
                pulled = _pulled(view, longest)
                has_credit = view.worker_id not in exceeding
                missing = _missing(prompt, view) if has_credit else prompt.num_blocks
                cost += self.costs.work * (missing - pulled)
                cost += (self.costs.pull_block or 0.0) * pulled
            options.append(_Option(view, work, view.worker_id in prompt.avoid, cost, cost))
        return options

    def _decode_options(
        self, prompt: Prompt, views: Sequence[WorkerView], prefill: _Option
    ) -> list[_Option]:
        costs = self.costs
        keeps_short = self._uses_prefixes and prompt.local_blocks > 0
        options = []
        for view, work in zip(views, _totals(views), strict=True):
            lacking = _missing(prompt, view)
            load = costs.sequence * work.sequences + costs.context_block * work.context_blocks
            option = _Option(view, work, view.worker_id in prompt.avoid, load, load)
            if keeps_short and work.queued_blocks + lacking <= prompt.local_blocks:
                option.stays = True
                option.cost += work.queued_blocks + costs.work * lacking
            else:
                option.num_suspects += prefill.num_suspects
                option.cost += costs.handoff + prefill.cost
                if self._uses_prefixes:
                    option.cost += costs.transfer_block * lacking
            if view.free_blocks is not None:
                option.lacks_room = view.free_blocks - view.predicted.context_blocks < lacking
            options.append(option)
        return options

    def _least(self, options: Sequence[_Option]) -> tuple[_Option, int]:
        """One of the best, and how many there are."""
        least = min(options, key=lambda o: (o.num_suspects, o.lacks_room, o.cost))
        rank = (least.num_suspects, least.lacks_room)
        limit = least.cost + TIE_TOLERANCE * least.scale
        ties = [o for o in options if o.cost <= limit and (o.num_suspects, o.lacks_room) == rank]
        return self._rng.choice(ties), len(ties)


class RoundRobin:
    """Takes workers in turn, suspects only when there are no others."""

    def __init__(self, costs: RoutingCosts) -> None:
        self.costs = costs
        self._num_decisions = 0

    def choose(
        self, prompt: Prompt, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
    ) -> Decision:
        """The next worker of each role."""
        prefill = self._next(prompt, prefills)
        decode = self._next(prompt, decodes)
        self._num_decisions += 1
        missing = _missing(prompt, prefill)
        return Decision(
            decode=decode.worker_id,
            prefill=prefill.worker_id,
            computed_blocks=missing,
            held_blocks=prompt.num_blocks - missing,
            queued_blocks=_totals([prefill])[0].queued_blocks,
            lacking_blocks=_missing(prompt, decode),
            load=_totals([decode])[0],
            num_suspects=(prefill.worker_id in prompt.avoid) + (decode.worker_id in prompt.avoid),
        )

    def _next(self, prompt: Prompt, views: Sequence[WorkerView]) -> WorkerView:
        trusted = [view for view in views if view.worker_id not in prompt.avoid] or views
        return trusted[self._num_decisions % len(trusted)]


def _missing(prompt: Prompt, view: WorkerView) -> float:
    return max(0.0, prompt.num_blocks - view.held_blocks)


def _pulled(view: WorkerView, longest: int) -> int:
    """Blocks that another worker could give it, if it is worth asking for them."""
    gain = longest - view.held_blocks
    return gain if gain >= MIN_PULLED_BLOCKS else 0


def _totals(views: Sequence[WorkerView]) -> list[Work]:
    """What each has to do: reported, or when that is unknown assumed, and predicted."""
    assumed: Work | None = None
    totals = []
    for view in views:
        reported = view.reported
        if reported is None:
            assumed = reported = assumed or _middling(views)
        predicted = view.predicted
        totals.append(
            Work(
                reported.queued_blocks + predicted.queued_blocks,
                reported.sequences + predicted.sequences,
                reported.context_blocks + predicted.context_blocks,
            )
        )
    return totals


def _middling(views: Sequence[WorkerView]) -> Work:
    """Load of a worker of which nothing is known: neither idle nor full."""
    known = [view.reported for view in views if view.reported is not None]
    if not known:
        return Work()
    return Work(
        median(work.queued_blocks for work in known),
        median(work.sequences for work in known),
        median(work.context_blocks for work in known),
    )
