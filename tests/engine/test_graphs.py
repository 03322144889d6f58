"""Which steps run at which size, and under which kind of graph."""

from __future__ import annotations

import pytest

from core.errors import StartupError
from engine.graphs import (
    GraphDispatcher,
    GraphKey,
    GraphKind,
    GraphMode,
    GraphOptions,
    default_capture_sizes,
)

DECODE, MIXED, PIECES = GraphKind.DECODE, GraphKind.MIXED, GraphKind.PIECES


def dispatcher(mode: str, *sizes: int) -> GraphDispatcher:
    return GraphDispatcher(GraphOptions(GraphMode[mode], sizes))


def test_sizes_are_1_2_4_and_multiples_of_8_up_to_the_most_sequences() -> None:
    assert default_capture_sizes(27) == (1, 2, 4, 8, 16, 24, 27)
    assert default_capture_sizes(1) == (1,)


@pytest.mark.parametrize(
    ("mode", "decode", "other"),
    [
        ("NONE", None, None),
        ("PIECEWISE", PIECES, PIECES),
        ("FULL", DECODE, MIXED),
        ("FULL_DECODE_ONLY", DECODE, None),
        ("FULL_AND_PIECEWISE", DECODE, PIECES),
    ],
)
def test_a_mode_says_what_decodes_and_other_steps_run_in(
    mode: str, decode: GraphKind | None, other: GraphKind | None
) -> None:
    chosen = [
        dispatcher(mode, 4).dispatch(3, is_decode, needs_layers=False)
        for is_decode in (True, False)
    ]
    assert chosen == [None if kind is None else GraphKey(kind, 4) for kind in (decode, other)]


def test_a_step_is_padded_to_the_next_size_and_runs_alone_beyond_the_largest() -> None:
    sizes = [
        dispatcher("FULL_DECODE_ONLY", 1, 2, 4, 8).dispatch(count, True, False)
        for count in (1, 3, 4, 5, 8, 9)
    ]
    assert [key and key.size for key in sizes] == [1, 4, 4, 8, 8, None]


def test_only_pieces_tell_when_a_layer_is_done() -> None:
    both = dispatcher("FULL_AND_PIECEWISE", 8)
    assert both.dispatch(3, False, needs_layers=True) == GraphKey(PIECES, 8)
    assert both.dispatch(3, True, needs_layers=True) is None


def test_the_largest_graphs_are_recorded_first() -> None:
    assert dispatcher("FULL", 1, 4).keys() == [
        GraphKey(DECODE, 4),
        GraphKey(MIXED, 4),
        GraphKey(DECODE, 1),
        GraphKey(MIXED, 1),
    ]


@pytest.mark.parametrize(("is_gpu", "mode"), [(True, "FULL_DECODE_ONLY"), (False, "NONE")])
def test_graphs_of_decodes_are_the_default_on_a_gpu(is_gpu: bool, mode: str) -> None:
    assert GraphOptions.resolve("auto", None, 4, is_gpu) == GraphOptions(GraphMode[mode], (1, 2, 4))


@pytest.mark.parametrize(
    ("mode", "sizes", "message"),
    [
        ("SOME", None, "graph_mode SOME is not supported"),
        ("FULL", [0, 4], "capture_sizes must be positive"),
        ("FULL", [], "capture_sizes must be positive"),
    ],
)
def test_bad_options_are_refused(mode: str, sizes: list[int] | None, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        GraphOptions.resolve(mode, sizes, 8, is_gpu=False)
