"""From steps to announcements."""

from __future__ import annotations

from engine.batch import SampledToken
from kvtransfer.base import BlockPart
from prefill_svc.progress import Piece, Pieces, Progress, ProgressQueue
from worker.first_tokens import FirstToken

FIRSTS = (FirstToken(0, SampledToken(7), None),)


def pieces(num_held: int = 0) -> Pieces:
    """Of a model with 6 layers of 10 bytes in a block."""
    return Pieces(num_held, num_layers=6, block_bytes=60)


def test_a_prompt_in_one_step_is_one_piece() -> None:
    assert pieces().due(Progress(3, 6, FIRSTS)) == Piece(0, 0, 3, None)


def test_what_decode_holds_is_not_announced() -> None:
    assert pieces(num_held=2).due(Progress(3, 6, FIRSTS)) == Piece(0, 2, 3, None)
    assert pieces(num_held=3).due(Progress(3, 6, FIRSTS)) == Piece(0, 3, 3, None)


def test_chunks_follow_each_other_and_one_without_a_new_block_is_silent() -> None:
    cutter = pieces()
    assert cutter.due(Progress(2, 6)) == Piece(0, 0, 2, None)
    assert cutter.due(Progress(2, 6)) is None
    assert cutter.due(Progress(5, 6, FIRSTS)) == Piece(1, 2, 5, None)


def test_groups_of_layers_are_parts_without_a_gap() -> None:
    cutter = pieces()
    assert cutter.due(Progress(4, 2)) == Piece(0, 0, 4, BlockPart(0, 20))
    assert cutter.due(Progress(4, 5)) == Piece(1, 0, 4, BlockPart(20, 30))
    assert cutter.due(Progress(4, 6)) == Piece(2, 0, 4, BlockPart(50, 10))
    assert cutter.due(Progress(6, 3)) == Piece(3, 4, 6, BlockPart(0, 30))
    assert cutter.due(Progress(6, 6, FIRSTS)) == Piece(4, 4, 6, BlockPart(30, 30))


def test_layers_of_blocks_that_decode_holds_are_silent() -> None:
    cutter = pieces(num_held=4)
    assert cutter.due(Progress(4, 2)) is None
    assert cutter.due(Progress(4, 6, FIRSTS)) == Piece(0, 4, 4, None)


async def test_unread_progress_of_the_same_blocks_is_replaced() -> None:
    queue = ProgressQueue()
    for progress in (Progress(4, 2), Progress(4, 6), Progress(4, 1), Progress(7, 3)):
        queue.put(progress)
    assert [await queue.get(), await queue.get()] == [Progress(4, 6), Progress(7, 3)]


async def test_an_error_is_never_dropped() -> None:
    queue = ProgressQueue()
    failed = Progress(0, 0, error=RuntimeError("x"))
    queue.put(Progress(0, 3))
    queue.put(failed)
    assert [await queue.get(), await queue.get()] == [Progress(0, 3), failed]
