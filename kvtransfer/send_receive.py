"""What the transports share whose owner sends its blocks: tcp and ucxx.

Every fault of a connection or of what came over it is an OSError here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from baton.v1 import kv_transfer_pb2
from kvtransfer.base import BlockPart, MemoryRegion

M = TypeVar("M", bound=Message)

LENGTH_BYTES = 4
"""A frame is a message behind its length in so many bytes, big-endian."""
MAX_FRAME_BYTES = 4 << 20
"""A read of 800,000 blocks fits; longer frames are refused before they are read."""


def region_view(region: MemoryRegion) -> memoryview:
    """The registered memory as bytes, writable, without a copy."""
    return memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")


def block_views(
    memory: memoryview, block_ids: Sequence[int], block_bytes: int, part: BlockPart
) -> Iterator[memoryview]:
    """This part of each block, in order, as bytes of `memory`."""
    for block_id in block_ids:
        start = block_id * block_bytes + part.offset
        yield memory[start : start + part.num_bytes]


def frame(message: Message) -> bytes:
    """The message as it goes over a connection."""
    payload = message.SerializeToString()
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def payload_length(header: bytes | bytearray) -> int:
    """Bytes of the message behind `header`. Raises ConnectionError for none or too many."""
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes")
    return length


def parse(kind: type[M], payload: bytes | bytearray) -> M:
    """The message. Raises ConnectionError when it is none."""
    try:
        return kind.FromString(bytes(payload))
    except DecodeError as error:
        raise ConnectionError(f"not a {kind.__name__}") from error


def requested_part(read: kv_transfer_pb2.KvRead, region: MemoryRegion) -> BlockPart:
    """What of each block a reader asks for. Raises ConnectionError for bytes out of bounds."""
    if not all(0 <= block_id < region.num_blocks for block_id in read.block_ids):
        raise ConnectionError("a reader asked for a block outside the pool")
    if read.offset == read.num_bytes == 0:
        return region.whole_block
    part = BlockPart(read.offset, read.num_bytes)
    if not part.is_inside(region.block_bytes):
        raise ConnectionError("a reader asked for bytes outside a block")
    return part
