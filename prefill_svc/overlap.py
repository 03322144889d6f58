"""Into how many groups of layers a chunk's KV is cut, so that its transfer hides behind it.

While a chunk is computed, the KV of its first layers is final long before that of the last
ones. Announced in g groups, all but the last group can move behind the computation; but each
group costs an announcement and a read of its own. So g follows from measured speeds: a short
prompt goes in one piece, a long one over a slow link in many.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.link import LinkEstimate

ANNOUNCE_COST_S = 1e-3
"""What one more announcement takes from the computation, in CPU time of both sides."""


@dataclass(frozen=True)
class Chunk:
    """What a step computes and has to move."""

    num_layers: int
    num_bytes: int
    compute_s: float
    """Expected; 0 when nothing is known."""


def layer_boundaries(chunk: Chunk, link: LinkEstimate) -> frozenset[int]:
    """Numbers of layers after which to announce, the last layer not among them.

    Empty when the chunk goes in one piece, also when a speed is not known yet.
    """
    if chunk.compute_s <= 0 or link.bytes_per_s <= 0 or chunk.num_bytes == 0:
        return frozenset()
    groups = min(
        range(1, chunk.num_layers + 1),
        key=lambda g: exposed_s(chunk, link, g) + ANNOUNCE_COST_S * (g - 1),
    )
    return frozenset(round(chunk.num_layers * i / groups) for i in range(1, groups))


def exposed_s(chunk: Chunk, link: LinkEstimate, num_groups: int) -> float:
    """How long after the computation the last of `num_groups` equal groups has arrived.

    Group i is final at i/g of the computation; reads follow each other. With reads slower
    than the computation they queue up from the first group on; else only the last shows.
    """
    read_s = link.read_s(chunk.num_bytes / num_groups)
    first_final_s = chunk.compute_s / num_groups
    return max(read_s, first_final_s + num_groups * read_s - chunk.compute_s)
