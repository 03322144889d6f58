"""Picks the pair of workers for an attempt: what is known of each, fed to `routing`."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton.v1 import types_pb2, worker_pb2
from core.errors import Unavailable
from core.fingerprint import hash_scope
from core.hashing import block_hashes
from router.attach import WorkerLink
from router.breaker import Breaker
from router.dispatch import Placement
from router.prefix_hints import PrefixHints
from router.prefix_source import MIN_GAIN_TOKENS, choose_source
from router.routing import DecodeView, PrefillView, choose_decode, choose_prefill
from router.workers import WorkerPool

_RETRY_AFTER_S = 5.0
"""Where a worker is missing: about what it takes to start one that is there to be started."""


@dataclass(frozen=True)
class Placer:
    """Chooses workers. `load_max_age_s`: older load reports count as unknown."""

    pool: WorkerPool
    breaker: Breaker
    hints: PrefixHints
    load_max_age_s: float
    rng: random.Random

    async def place(
        self, token_ids: Sequence[int], salt: str = "", avoid: Collection[str] = frozenset()
    ) -> Placement:
        """A pair for a sequence that begins with `token_ids`, cached in the scope of `salt`.

        Raises Unavailable.
        """
        candidates = self._links(types_pb2.ROLE_PREFILL) + self._links(types_pb2.ROLE_DECODE)
        fingerprint = self.pool.fingerprint
        assert fingerprint is not None, "a usable worker implies a fingerprint"
        block_size = fingerprint.block_size
        num_blocks = -(-len(token_ids) // block_size)
        hashes = block_hashes(token_ids, block_size, hash_scope(fingerprint, salt))
        held = await self.hints.held_blocks(hashes, candidates)
        # Workers may have come and gone during the wait.
        prefills = {link.worker_id: link for link in self._links(types_pb2.ROLE_PREFILL)}
        decodes = {link.worker_id: link for link in self._links(types_pb2.ROLE_DECODE)}
        prefill_views = [self._prefill_view(link, held, block_size) for link in prefills.values()]
        prefill_id = choose_prefill(prefill_views, num_blocks, self.rng, avoid)
        decode_views = [self._decode_view(link, held) for link in decodes.values()]
        decode_id = choose_decode(decode_views, num_blocks, self.rng, avoid)
        assert prefill_id is not None and decode_id is not None
        num_held_tokens = held.get(prefill_id, 0) * block_size
        return Placement(
            prefill=prefills[prefill_id],
            decode=decodes[decode_id],
            num_missing_tokens=max(1, len(token_ids) - num_held_tokens),
            source=self._source(prefill_id, prefills | decodes, held, avoid),
        )

    def _source(
        self,
        prefill_id: str,
        links: Mapping[str, WorkerLink],
        held: Mapping[str, int],
        avoid: Collection[str],
    ) -> worker_pb2.PrefixSource | None:
        """Whose prefix the prefill worker may take over."""
        assert self.pool.fingerprint is not None
        min_gain_blocks = -(-MIN_GAIN_TOKENS // self.pool.fingerprint.block_size)
        held = {worker_id: held.get(worker_id, 0) for worker_id in links}
        source_id = choose_source(held, prefill_id, min_gain_blocks, self.rng, avoid)
        return None if source_id is None else links[source_id].prefix(held[source_id])

    def _links(self, role: types_pb2.Role.ValueType) -> list[WorkerLink]:
        links = self.pool.usable(role)
        if not links:
            name = types_pb2.Role.Name(role).removeprefix("ROLE_").lower()
            raise Unavailable(f"no {name} worker is ready", retry_after_s=_RETRY_AFTER_S)
        return self.breaker.allowed(links)

    def _prefill_view(self, link: WorkerLink, held: dict[str, int], block_size: int) -> PrefillView:
        load = link.fresh_load(self.load_max_age_s)
        return PrefillView(
            worker_id=link.worker_id,
            held_blocks=held.get(link.worker_id, 0),
            reported_blocks=None if load is None else load.queued_tokens / block_size,
            predicted_blocks=link.tokens_sent_since_report / block_size,
        )

    def _decode_view(self, link: WorkerLink, held: dict[str, int]) -> DecodeView:
        load = link.fresh_load(self.load_max_age_s)
        return DecodeView(
            worker_id=link.worker_id,
            held_blocks=held.get(link.worker_id, 0),
            reported_sequences=None if load is None else load.running + load.queue_depth,
            predicted_sequences=link.num_sent_since_report,
            free_blocks=None if load is None else load.blocks.free + load.blocks.cached,
        )
