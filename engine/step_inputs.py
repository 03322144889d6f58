"""A step as the device sees it: lists made from a batch, and buffers of fixed place for graphs."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from engine.attention import SequenceChunk
from engine.batch import ScheduledSequence


@dataclass(frozen=True)
class StepInputs:
    """The step's tokens one after the other, in the order of `chunks`."""

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    chunks: list[SequenceChunk]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_decode_only(self) -> bool:
        return len(self.chunks) == len(self.input_ids)

    @classmethod
    def of(cls, items: Rows[ScheduledSequence], block_size: int) -> StepInputs:
        """What `items` compute, in their order."""
        inputs = cls([], [], [], [])
        for item in items:
            end = item.start + item.num_tokens
            table = item.sequence.block_table
            inputs.input_ids.extend(item.sequence.token_slice(item.start, end))
            inputs.positions.extend(range(item.start, end))
            inputs.slots.extend(
                table[p // block_size] * block_size + p % block_size for p in range(item.start, end)
            )
            inputs.chunks.append(SequenceChunk(item.start, item.num_tokens, table))
        return inputs


class PersistentTensor:
    """A tensor whose place never changes, and on a GPU pinned host memory beside it.

    A `write` must not follow another before the device has caught up, which it has at the end
    of every step.
    """

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        is_cpu = device.type == "cpu"
        self.host = torch.zeros(sizes, dtype=dtype, pin_memory=not is_cpu)
        self.device = self.host if is_cpu else torch.zeros(sizes, dtype=dtype, device=device)

    def write(self, values: Rows[float], size: int, padding: float) -> None:
        """Sets the first `size` entries: `values`, then `padding`."""
        self.host[: len(values)] = torch.tensor(values, dtype=self.host.dtype)
        self.host[len(values) : size] = padding
        self.copy(slice(0, size))

    def copy(self, part: slice | tuple[int, slice]) -> None:
        """Brings a part of `host` to the device."""
        if self.device is not self.host:
            self.device[part].copy_(self.host[part], non_blocking=True)


class BlockTables:
    """The block tables of a step's rows. Rows that did not change are not written again."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device) -> None:
        self._tensor = PersistentTensor((num_rows, num_columns), torch.int32, device)
        self._written: list[list[int]] = [[] for _ in range(num_rows)]

    @property
    def device(self) -> torch.Tensor:
        """int32 [rows, columns]."""
        return self._tensor.device

    def write(self, tables: Rows[list[int]]) -> None:
        """Sets the first rows; those after them keep what they hold, which nobody reads."""
        for row, table in enumerate(tables):
            if self._written[row] != table:
                numbers = torch.tensor(table, dtype=torch.int32)
                self._tensor.host[row, : len(table)] = numbers
                self._tensor.copy((row, slice(0, len(table))))
                self._written[row] = list(table)


class TokenBuffers:
    """Ids, positions and slots of a step's tokens; int64 [size]."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.input_ids = PersistentTensor((size,), torch.int64, device)
        self.positions = PersistentTensor((size,), torch.int64, device)
        self.slots = PersistentTensor((size,), torch.int64, device)

    def write(self, inputs: StepInputs, size: int) -> None:
        """Tokens that pad are token 0 at position 0 and have no slot."""
        self.input_ids.write(inputs.input_ids, size, 0)
        self.positions.write(inputs.positions, size, 0)
        self.slots.write(inputs.slots, size, -1)
