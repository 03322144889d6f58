"""A deployment in simulated time, whose router is the real policy code.

The router sees what it would see in life: each pod's load report of every second, its own
predicted load on top, and a prefix index that lags behind the caches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.routing_decode_pod import DecodePod
from bench.routing_pods import BLOCK, Clock, CostModel, Holdings, Job, PrefillPod
from bench.routing_trace import TRACE_BLOCK, LruBlocks, Request
from router.policies import PolicyName, make_policy
from router.predicted_load import PredictedLoad
from router.routing import Decision, Prompt, RoutingCosts, Work, WorkerView

REPORT_INTERVAL_S = 1.0
INDEX_LAG_S = 0.1
BLOCKS_PER_ID = TRACE_BLOCK // BLOCK


@dataclass(frozen=True)
class Cluster:
    """What is simulated."""

    costs: CostModel
    num_prefill: int = 8
    num_decode: int = 8
    cache_blocks: int = 2500
    """Trace blocks in the pool of each pod."""
    local_prefill_tokens: int = 128
    routing: RoutingCosts = field(default_factory=RoutingCosts)


@dataclass
class Outcome:
    """What one policy made of a trace."""

    ttft_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_computed: int = 0
    num_stayed: int = 0
    duration_s: float = 0.0
    prefill_busy_s: list[float] = field(default_factory=list)
    decode_sequence_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return 1 - self.num_computed / self.num_prompt

    @property
    def prefill_imbalance(self) -> float:
        return _imbalance(self.prefill_busy_s)

    @property
    def decode_imbalance(self) -> float:
        return _imbalance(self.decode_sequence_s)


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) / (sum(loads) / len(loads))


@dataclass
class _Link:
    """What the router knows of one pod."""

    pod: PrefillPod | DecodePod
    predicted: PredictedLoad = field(default_factory=PredictedLoad)
    reported: Work = field(default_factory=Work)
    free_blocks: float | None = None
    accepted: list[int] = field(default_factory=list)
    """What the next report tells of for the first time."""

    def report(self) -> None:
        """A load report arrives."""
        if isinstance(self.pod, DecodePod):
            self.reported, self.free_blocks = self.pod.report()
        else:
            self.reported = self.pod.report()
        self.predicted.reported(self.accepted)
        self.accepted = []

    def view(self, request: Request) -> WorkerView:
        return WorkerView(
            worker_id=self.pod.name,
            held_blocks=self.pod.holdings.num_known(request.hash_ids) * BLOCKS_PER_ID,
            reported=self.reported,
            predicted=self.predicted.total,
            free_blocks=self.free_blocks,
        )


class Simulation:
    """One run. Use once."""

    def __init__(self, cluster: Cluster, policy: PolicyName, seed: int) -> None:
        self._cluster = cluster
        self._clock = Clock()
        self._policy = make_policy(policy, cluster.routing, random.Random(seed))
        self._prefills = {
            name: _Link(PrefillPod(name, cluster.costs, self._holdings()))
            for name in (f"prefill-{index}" for index in range(cluster.num_prefill))
        }
        num_blocks = cluster.cache_blocks * BLOCKS_PER_ID
        self._decodes = {
            name: _Link(DecodePod(name, cluster.costs, self._holdings(), num_blocks))
            for name in (f"decode-{index}" for index in range(cluster.num_decode))
        }
        self._outcome = Outcome()
        self._num_open = 0

    def _holdings(self) -> Holdings:
        return Holdings(LruBlocks(self._cluster.cache_blocks), self._clock, INDEX_LAG_S)

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Plays all requests to their ends."""
        self._num_open = len(requests)
        for number, request in enumerate(requests):
            self._arrive_at(number, request)
        links = [*self._prefills.values(), *self._decodes.values()]
        for index, link in enumerate(links):
            # Pods report each at a time of its own.
            self._report(link, REPORT_INTERVAL_S * index / len(links))
        self._clock.run()
        outcome = self._outcome
        outcome.duration_s = self._clock.now
        for link in links:
            if isinstance(link.pod, PrefillPod):
                outcome.prefill_busy_s.append(link.pod.busy_s)
            else:
                outcome.decode_sequence_s.append(link.pod.sequence_s)
        return outcome

    def _arrive_at(self, number: int, request: Request) -> None:
        self._clock.at(request.arrival_s, lambda: self._route(number, request))

    def _report(self, link: _Link, at_s: float) -> None:
        def act() -> None:
            link.report()
            if self._num_open:
                self._report(link, self._clock.now + REPORT_INTERVAL_S)

        self._clock.at(at_s, act)

    def _route(self, number: int, request: Request) -> None:
        prompt = Prompt(
            num_blocks=request.num_prompt / BLOCK,
            local_blocks=self._cluster.local_prefill_tokens / BLOCK,
        )
        decision = self._policy.choose(
            prompt,
            [link.view(request) for link in self._prefills.values()],
            [link.view(request) for link in self._decodes.values()],
        )
        self._dispatch(number, request, decision)

    def _dispatch(self, number: int, request: Request, decision: Decision) -> None:
        decode = self._decodes[decision.decode]
        prefill = self._prefills[decision.prefill] if decision.prefill is not None else None
        assert isinstance(decode.pod, DecodePod)
        links = [decode] if prefill is None else [decode, prefill]

        def on_first_token(job: Job) -> None:
            for link in links:
                link.predicted.prefilled(number)
            self._outcome.ttft_s.append(self._clock.now - request.arrival_s)
            self._outcome.num_computed += job.computed_tokens

        def on_end(job: Job) -> None:
            for link in links:
                link.predicted.remove(number)
            self._num_open -= 1

        job = Job(number, request, on_first_token, on_end, decode.pod)
        self._outcome.num_prompt += request.num_prompt
        context = decision.lacking_blocks
        if prefill is None:
            self._outcome.num_stayed += 1
            decode.predicted.add(number, Work(decision.computed_blocks, 1, context))
            decode.pod.prefill(job)
        else:
            assert isinstance(prefill.pod, PrefillPod)
            prefill.predicted.add(number, Work(queued_blocks=decision.computed_blocks))
            decode.predicted.add(number, Work(sequences=1, context_blocks=context))
            decode.pod.assign(job)
            prefill.pod.add(job)
        for link in links:
            link.accepted.append(number)
