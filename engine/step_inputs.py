"""A step as the device sees it: lists made from a batch, and buffers of fixed place for graphs."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import cycle

import torch

from engine.attention import SequenceChunk
from engine.batch import ScheduledSequence


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for, where there is a GPU to copy to."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class AwaitedTokens:
    """Tokens for some rows of a step; int64 [rows] both, on the device."""

    rows: torch.Tensor
    token_ids: torch.Tensor

    def put_into(self, input_ids: torch.Tensor) -> None:
        """Replaces what stands in those rows, without the host."""
        input_ids.index_copy_(0, self.rows, self.token_ids)


@dataclass(frozen=True)
class StepInputs:
    """The step's tokens one after the other, in the order of `chunks`."""

    input_ids: list[int]
    """0 for a token that only the device knows."""
    positions: list[int]
    slots: list[int]
    chunks: list[SequenceChunk]
    awaited: AwaitedTokens | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_decode_only(self) -> bool:
        return len(self.chunks) == len(self.input_ids)

    @classmethod
    def of(
        cls,
        items: Rows[ScheduledSequence],
        block_size: int,
        awaited: AwaitedTokens | None = None,
    ) -> StepInputs:
        """What `items` compute, in their order."""
        inputs = cls([], [], [], [], awaited)
        for item in items:
            end = item.start + item.num_tokens
            # The list itself may grow at any moment.
            table = item.block_table[: -(-end // block_size)]
            inputs.input_ids.extend(
                [0] if item.awaits_token else item.sequence.token_slice(item.start, end)
            )
            inputs.positions.extend(range(item.start, end))
            inputs.slots.extend(
                table[p // block_size] * block_size + p % block_size for p in range(item.start, end)
            )
            inputs.chunks.append(SequenceChunk(item.start, item.num_tokens, table))
        return inputs


class PersistentTensor:
    """A tensor whose place never changes, and on a GPU pinned host memory beside it.

    A step writes it once at most. Of two steps in flight, the second writes while the first's
    copies may still be on their way, so their host memory takes turns.
    """

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(sizes, dtype=dtype, device=device)
        is_cpu = device.type == "cpu"
        pinned = [
            torch.zeros(sizes, dtype=dtype, pin_memory=True) for _ in range(0 if is_cpu else 2)
        ]
        self._hosts = cycle(pinned or [self.device])

    def write(self, values: Rows[float], size: int, padding: float) -> None:
        """Sets the first `size` entries: `values`, then `padding`."""
        host = self.next_host()
        host[: len(values)] = torch.tensor(values, dtype=host.dtype)
        host[len(values) : size] = padding
        self.copy(host, slice(0, size))

    def next_host(self) -> torch.Tensor:
        """Where this step may write."""
        return next(self._hosts)

    def copy(self, host: torch.Tensor, part: slice | tuple[int, slice]) -> None:
        """Brings a part of what was written to the device."""
        if self.device is not host:
            self.device[part].copy_(host[part], non_blocking=True)


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
        host = self._tensor.next_host()
        for row, table in enumerate(tables):
            if self._written[row] != table:
                host[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
                self._tensor.copy(host, (row, slice(0, len(table))))
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
        if inputs.awaited is not None:
            inputs.awaited.put_into(self.input_ids.device)
        self.positions.write(inputs.positions, size, 0)
        self.slots.write(inputs.slots, size, -1)
