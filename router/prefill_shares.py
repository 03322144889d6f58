"""Who has computed more than its share of prompts lately.

A prefix that many requests begin with has a home, and a policy that goes by caches sends all of
them there. At light load nothing waits, so nothing in the costs speaks against it, and one worker
is busy most of the time beside idle ones. A worker over its share gets no credit for its cache:
others compute the prefix once, too, and are homes of it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHARE = 1.15
"""Of the mean."""
NUM_REMEMBERED = 256
"""Prompts for each worker whose computed blocks count, the latest the most."""
NUM_BY_CHANCE = 8
"""So many average prompts more than that are chance, of which few prompts leave much."""


class PrefillShares:
    """Blocks by prefill worker, as one router has sent them."""

    def __init__(self) -> None:
        self._blocks: dict[str, float] = {}
        self._num_prompts = 0.0

    def add(self, worker_id: str, num_blocks: float) -> None:
        """A prompt goes there of which so many blocks are to be computed."""
        keep = 1 - 1 / (NUM_REMEMBERED * max(1, len(self._blocks)))
        self._num_prompts = keep * self._num_prompts + 1
        for name in self._blocks:
            self._blocks[name] *= keep
        self._blocks[worker_id] = self._blocks.get(worker_id, 0.0) + num_blocks

    def exceeding(self, worker_ids: Sequence[str]) -> set[str]:
        """Those of all present workers that have more than their share.

        Who is new begins with the mean; who is not among them any more is forgotten.
        """
        if self._blocks.keys() != set(worker_ids):
            known = {name: self._blocks[name] for name in worker_ids if name in self._blocks}
            mean = sum(known.values()) / len(known) if known else 0.0
            self._num_prompts *= len(worker_ids) / max(1, len(self._blocks))
            self._blocks = {name: known.get(name, mean) for name in worker_ids}
        total = sum(self._blocks.values())
        by_chance = NUM_BY_CHANCE * total / max(1.0, self._num_prompts)
        limit = MAX_SHARE * total / len(worker_ids) + by_chance
        return {name for name, num_blocks in self._blocks.items() if num_blocks > limit}
