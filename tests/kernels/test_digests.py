"""Digests of a device are those of the host."""

from __future__ import annotations

import pytest
import torch
import xxhash

from engine.kernels.digests import digest_ranges
from engine.kv_cache import BlockShape, KVCache
from kvtransfer.base import MemoryRegion
from kvtransfer.digests import host_ranges
from worker.device_digests import DeviceDigests


@pytest.mark.parametrize("num_bytes", [248, 1016, 1024, 1032, 1088, 1096, 2048, 4096 + 64, 5000])
def test_digests_equal_those_of_the_library(num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    memory = torch.randint(-(1 << 62), 1 << 62, (4000,), generator=generator)
    raw = memory.numpy().tobytes()
    firsts = [0, 1, 777, 2000]
    expected = [
        xxhash.xxh3_64_intdigest(raw[8 * first : 8 * first + num_bytes]) for first in firsts
    ]
    assert digest_ranges(memory, firsts, num_bytes) == expected


def test_words_of_ones_and_zeros_too() -> None:
    for word in (0, -1):
        memory = torch.full((300,), word)
        expected = xxhash.xxh3_64_intdigest(memory.numpy().tobytes())
        assert digest_ranges(memory, [0], 2400) == [expected]


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_blocks_and_groups_of_their_layers_have_the_digests_of_the_host(
    is_fp8: bool, block_size: int
) -> None:
    shape = BlockShape(3, 1, block_size, 34, torch.float16, is_fp8)
    cache = KVCache(shape, 5, torch.device("cpu"))
    raw = cache.data.view(-1).view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(0)))
    host = host_ranges(MemoryRegion(cache.data_ptr(), 5, cache.block_bytes))
    device = DeviceDigests(cache.data)
    for first_layer, num_layers in ((0, 3), (1, 2), (2, 1)):
        starts = [b * cache.block_bytes + first_layer * shape.layer_bytes for b in (4, 0, 1)]
        num_bytes = num_layers * shape.layer_bytes
        assert device(starts, num_bytes) == host(starts, num_bytes)
