"""Which steps are replayed as a graph, and at which size: decisions only, no device.

A graph launches at once what would be hundreds of launches, and works on fixed sizes: a step is
padded to the next size that was captured. What is larger than all of them runs without.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import StartupError


class GraphMode(enum.Enum):
    """What is captured; its value is the option's."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    """Every step, in pieces between the attentions, which run outside."""
    FULL = "FULL"
    """Every step as a whole."""
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    """Steps of one token a sequence as a whole; others run without a graph."""
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"
    """Steps of one token a sequence as a whole, others in pieces."""


class GraphKind(enum.Enum):
    """What one graph holds."""

    DECODE = "decode"
    """A whole step with one token a sequence, sampling included."""
    MIXED = "mixed"
    """A whole step with chunks of any length, up to the hidden states."""
    PIECES = "pieces"
    """The same without the attentions."""


_KINDS = {
    GraphMode.NONE: (None, None),
    GraphMode.PIECEWISE: (GraphKind.PIECES, GraphKind.PIECES),
    GraphMode.FULL: (GraphKind.DECODE, GraphKind.MIXED),
    GraphMode.FULL_DECODE_ONLY: (GraphKind.DECODE, None),
    GraphMode.FULL_AND_PIECEWISE: (GraphKind.DECODE, GraphKind.PIECES),
}
"""For steps of decodes alone, and for all others."""


@dataclass(frozen=True)
class GraphKey:
    """One graph: its kind, and the number of tokens that it computes, padding included."""

    kind: GraphKind
    size: int

    @property
    def mode(self) -> GraphMode:
        """How steps run in it: PIECEWISE, or FULL as a whole."""
        return GraphMode.PIECEWISE if self.kind is GraphKind.PIECES else GraphMode.FULL


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8; `max_num_seqs` is the last."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs]
    return tuple(sorted({size for size in sizes if size <= max_num_seqs}))


@dataclass(frozen=True)
class GraphOptions:
    """What the operator chose, every default filled in."""

    mode: GraphMode
    capture_sizes: tuple[int, ...]

    @classmethod
    def resolve(
        cls, mode: str, capture_sizes: Sequence[int] | None, max_num_seqs: int, is_gpu: bool
    ) -> GraphOptions:
        """`mode` "auto": FULL_DECODE_ONLY on a GPU, else NONE. Raises StartupError."""
        if mode == "auto":
            mode = "FULL_DECODE_ONLY" if is_gpu else "NONE"
        if mode not in GraphMode.__members__:
            supported = ", ".join(("auto", *GraphMode.__members__))
            raise StartupError(f"graph_mode {mode} is not supported; supported: {supported}")
        sizes = default_capture_sizes(max_num_seqs) if capture_sizes is None else capture_sizes
        if not sizes or min(sizes) < 1:
            raise StartupError(f"capture_sizes must be positive numbers, are {list(sizes)}")
        return cls(GraphMode[mode], tuple(sorted(set(sizes))))


class GraphDispatcher:
    """Chooses the graph of a step."""

    def __init__(self, options: GraphOptions) -> None:
        self._decode, self._other = _KINDS[options.mode]
        self._sizes = options.capture_sizes

    @property
    def largest(self) -> int:
        """Tokens of the largest graph."""
        return self._sizes[-1]

    def keys(self) -> list[GraphKey]:
        """All graphs, the largest first: those that follow fit into its memory."""
        kinds = [kind for kind in GraphKind if kind in (self._decode, self._other)]
        return [GraphKey(kind, size) for size in reversed(self._sizes) for kind in kinds]

    def dispatch(
        self, num_tokens: int, is_decode_only: bool, needs_layers: bool
    ) -> GraphKey | None:
        """The smallest graph that holds the step; None: run it without one.

        `needs_layers`: somebody wants to know when each layer is done, which no whole step
        tells.
        """
        kind = self._decode if is_decode_only else self._other
        if kind is None or num_tokens > self.largest:
            return None
        if needs_layers and kind is not GraphKind.PIECES:
            return None
        return GraphKey(kind, self._sizes[bisect_left(self._sizes, num_tokens)])
