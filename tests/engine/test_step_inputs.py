"""What a step's buffers hold after each write."""

from __future__ import annotations

import pytest
import torch

from engine.attention import SequenceChunk
from engine.batch import ScheduledSequence
from engine.last_tokens import LastTokens
from engine.step_inputs import BlockTables, StepInputs, TokenBuffers
from tests.engine.builders import make_sequence

CPU = torch.device("cpu")


def inputs_of(num_tokens: int) -> StepInputs:
    tokens = list(range(1, num_tokens + 1))
    return StepInputs(tokens, tokens, tokens, [SequenceChunk(0, num_tokens, [0])])


def test_a_steps_tokens_lie_one_sequence_after_the_other() -> None:
    first, second = make_sequence("a", [5, 6, 7]), make_sequence("b", [8, 9])
    first.block_table, second.block_table = [4, 1], [3]
    items = [
        ScheduledSequence.of(first, 1, 2),
        ScheduledSequence.of(second, 0, 1),
    ]
    assert StepInputs.of(items, block_size=2) == StepInputs(
        input_ids=[6, 7, 8],
        positions=[1, 2, 0],
        slots=[9, 2, 6],
        chunks=[SequenceChunk(1, 2, [4, 1]), SequenceChunk(0, 1, [3])],
    )


def test_a_token_that_only_the_device_knows_is_put_in_there() -> None:
    known, awaiting = make_sequence("a", [5, 6]), make_sequence("b", [8, 9])
    known.block_table, awaiting.block_table = [0], [1, 2]
    last = LastTokens(CPU)
    last.keep([ScheduledSequence.of(awaiting, 1, 1)], torch.tensor([77], dtype=torch.int32))
    items = [ScheduledSequence.of(known, 0, 2), ScheduledSequence.of(awaiting, 2, 1)]
    buffers = TokenBuffers(4, CPU)
    buffers.write(StepInputs.of(items, 2, last.awaited(items)), 4)
    assert buffers.input_ids.device.tolist() == [5, 6, 77, 0]
    assert buffers.slots.device.tolist() == [0, 1, 4, -1]


@pytest.mark.parametrize("kept", [[], [-1]])
def test_token_0_stands_in_for_one_that_a_failed_step_did_not_yield(kept: list[int]) -> None:
    sequence = make_sequence("a", [5])
    sequence.block_table = [0]
    last = LastTokens(CPU)
    last.keep([ScheduledSequence.of(sequence, 0, 1)] * len(kept), torch.tensor(kept).int())
    items = [ScheduledSequence.of(sequence, 1, 1)]
    buffers = TokenBuffers(1, CPU)
    buffers.write(StepInputs.of(items, 2, last.awaited(items)), 1)
    assert buffers.input_ids.device.tolist() == [0]


def test_a_block_table_that_grows_meanwhile_is_read_up_to_the_step() -> None:
    sequence = make_sequence("a", [5, 6])
    sequence.block_table = [3]
    item = ScheduledSequence.of(sequence, 0, 2)
    sequence.block_table.append(4)
    assert StepInputs.of([item], block_size=2).chunks == [SequenceChunk(0, 2, [3])]


def test_only_single_tokens_are_a_step_of_decodes() -> None:
    chunks = [SequenceChunk(3, 1, [0]), SequenceChunk(0, 1, [1])]
    assert StepInputs([1, 2], [3, 0], [3, 4], chunks).is_decode_only
    assert not inputs_of(2).is_decode_only


def test_padding_is_written_anew_by_every_step() -> None:
    buffers = TokenBuffers(4, CPU)
    buffers.write(inputs_of(3), 4)
    buffers.write(inputs_of(1), 4)
    assert buffers.input_ids.device.tolist() == [1, 0, 0, 0]
    assert buffers.positions.device.tolist() == [1, 0, 0, 0]
    assert buffers.slots.device.tolist() == [1, -1, -1, -1]


def test_a_row_gets_a_longer_table_another_table_and_a_shorter_one() -> None:
    tables = BlockTables(2, 3, CPU)
    seen = []
    for table in ([7], [7, 8], [1, 2, 3], [5]):
        tables.write([table, [9]])
        seen.append(tables.device[0, : len(table)].tolist())
    assert seen == [[7], [7, 8], [1, 2, 3], [5]]
    assert tables.device[1, 0] == 9
