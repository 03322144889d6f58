"""From whom a prefill worker may take over a prefix instead of computing it: a pure choice.

The router knows from the prefix index who holds how much. Whether fetching it is the quicker way
is prefill's to decide, who has measured the link and its own pace (`prefill_svc.prefix_fetch`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

MIN_GAIN_TOKENS = 64
"""Fewer are computed about as soon as another pod is asked for them."""


def choose_source(
    held_blocks: Mapping[str, int],
    prefill_id: str,
    min_gain_blocks: int,
    rng: random.Random,
    avoid: Collection[str] = (),
) -> str | None:
    """One of the workers that hold the most of a prompt; None when `prefill_id` gains too little.

    `held_blocks`: leading blocks by worker id, of either role. Workers in `avoid` are not asked.
    """
    others = {name: held for name, held in held_blocks.items() if name not in avoid}
    most = max(others.values(), default=0)
    if most - held_blocks.get(prefill_id, 0) < max(1, min_gain_blocks):
        return None
    return rng.choice([name for name, held in others.items() if held == most])
