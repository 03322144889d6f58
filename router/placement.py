"""Picks the workers of an attempt: what is known of each, fed to a routing policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.fingerprint import hash_scope
from core.hashing import block_hashes
from core.logs import event
from router.attach import WorkerLink
from router.breaker import Breaker
from router.dispatch import Placement
from router.local_prefill import LocalPrefillLimit
from router.prefix_hints import PrefixHints
from router.routing import Decision, Policy, Prompt, RoutingCounters, Work, WorkerView
from router.workers import WorkerPool

_RETRY_AFTER_S = 5.0
"""Where a worker is missing: about what it takes to start one that is there to be started."""

_BLOCKS_AT_ONCE = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sought:
    """A sequence that begins with `token_ids`. Workers in `avoid` come last."""

    token_ids: Sequence[int]
    salt: str = ""
    """Scope of the prefix cache."""
    avoid: Collection[str] = frozenset()
    may_stay: bool = True
    """Whether decode may compute the prompt itself."""


@dataclass(frozen=True)
class Placer:
    """Chooses workers. `load_max_age_s`: older load reports count as unknown."""

    pool: WorkerPool
    breaker: Breaker
    hints: PrefixHints
    load_max_age_s: float
    policy: Policy
    local_limit: LocalPrefillLimit
    counters: RoutingCounters

    async def place(self, sought: Sought) -> Placement:
        """The workers for one attempt. Raises Unavailable."""
        candidates = self._links(types_pb2.ROLE_PREFILL) + self._links(types_pb2.ROLE_DECODE)
        fingerprint = self.pool.fingerprint
        assert fingerprint is not None, "a usable worker implies a fingerprint"
        block_size = fingerprint.block_size
        scope = hash_scope(fingerprint, sought.salt)
        hashes = await _block_hashes(sought.token_ids, block_size, scope)
        held = await self.hints.held_blocks(hashes, candidates)
        # Workers may have come and gone during the wait.
        prefills = self._links(types_pb2.ROLE_PREFILL)
        decodes = self._links(types_pb2.ROLE_DECODE)
        prompt = Prompt(
            num_blocks=len(sought.token_ids) / block_size,
            avoid=sought.avoid,
            local_blocks=self._local_tokens(sought, prefills, decodes) / block_size,
        )
        decision = self.policy.choose(
            prompt,
            [self._view(link, held, block_size) for link in prefills],
            [self._view(link, held, block_size) for link in decodes],
        )
        self.counters.count(decision)
        self._log(decision)
        uncached = decision.computed_blocks + decision.pulled_blocks
        placement = _placement(decision, prefills, decodes, held)
        return replace(placement, num_uncached=round(uncached * block_size))

    def _links(self, role: types_pb2.Role.ValueType) -> list[WorkerLink]:
        links = self.pool.usable(role)
        if not links:
            name = types_pb2.Role.Name(role).removeprefix("ROLE_").lower()
            raise Unavailable(f"no {name} worker is ready", retry_after_s=_RETRY_AFTER_S)
        return self.breaker.allowed(links)

    def _local_tokens(
        self, sought: Sought, prefills: Sequence[WorkerLink], decodes: Sequence[WorkerLink]
    ) -> float:
        """What decode may have to compute for a prompt that it keeps."""
        if not sought.may_stay:
            return 0.0
        return self.local_limit.max_tokens(_speeds(prefills), _speeds(decodes))

    def _view(self, link: WorkerLink, held: dict[str, int], block_size: int) -> WorkerView:
        load = link.fresh_load(self.load_max_age_s)
        view = WorkerView(
            worker_id=link.worker_id,
            held_blocks=held.get(link.worker_id, 0),
            reported=None,
            predicted=link.predicted.total,
        )
        if load is not None:
            blocks = load.blocks
            view.reported = Work(
                queued_blocks=load.queued_tokens / block_size,
                sequences=load.requests,
                context_blocks=blocks.referenced + load.pending_blocks,
            )
            view.free_blocks = blocks.free + blocks.cached - load.pending_blocks
        return view

    def _log(self, decision: Decision) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            event(
                logger,
                logging.DEBUG,
                "routed",
                prefill=decision.prefill or "-",
                decode=decision.decode,
                cost=decision.formula(self.policy.costs),
                num_ties=decision.num_ties,
                num_suspects=decision.num_suspects,
                lacks_room=decision.lacks_room,
            )


async def _block_hashes(token_ids: Sequence[int], block_size: int, scope: bytes) -> list[bytes]:
    """In pieces, between which other streams have their turn."""
    hashes: list[bytes] = []
    step = _BLOCKS_AT_ONCE * block_size
    for start in range(0, len(token_ids), step):
        if len(token_ids) > step:
            await asyncio.sleep(0)
        parent = hashes[-1] if hashes else scope
        hashes += block_hashes(token_ids[start : start + step], block_size, parent)
    return hashes


def _speeds(links: Sequence[WorkerLink]) -> list[float]:
    """Seconds per prompt token of those that have told."""
    speeds = [link.load.prefill_s_per_token for link in links if link.load is not None]
    return [speed for speed in speeds if speed > 0]


def _placement(
    decision: Decision,
    prefills: Sequence[WorkerLink],
    decodes: Sequence[WorkerLink],
    held: Mapping[str, int],
) -> Placement:
    by_id = {link.worker_id: link for link in (*prefills, *decodes)}
    stays = decision.prefill is None
    source = decision.pull_from
    return Placement(
        prefill=None if decision.prefill is None else by_id[decision.prefill],
        decode=by_id[decision.decode],
        prefill_work=Work(queued_blocks=decision.computed_blocks, sequences=1),
        decode_work=Work(
            queued_blocks=decision.computed_blocks if stays else 0.0,
            sequences=1,
            context_blocks=decision.lacking_blocks,
        ),
        source=None if source is None else by_id[source].prefix(held[source]),
    )
