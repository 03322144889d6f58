"""Layout of the KV cache and how many blocks it gets."""

from __future__ import annotations

import pytest
import torch

from core.errors import StartupError
from engine.kv_cache import (
    BlockShape,
    KVCache,
    available_memory,
    cpu_budget,
    decide_num_blocks,
    gpu_budget,
)

SHAPE = BlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_a_block_is_one_contiguous_range_of_bytes() -> None:
    cache = KVCache(SHAPE, 5, CPU)
    assert cache.block_bytes == 3 * 2 * 2 * 4 * 8 * 2
    assert cache.data.is_contiguous()
    assert cache.data[2].data_ptr() == cache.data_ptr() + 2 * cache.block_bytes
    assert cache.num_bytes == 5 * cache.block_bytes


def test_a_layer_is_a_view_that_starts_zeroed() -> None:
    cache = KVCache(SHAPE, 5, CPU)
    assert cache.layer(1).shape == (5, 2, 2, 4, 8)
    cache.layer(1)[4, 1, 0, 3, 7] = 1
    assert cache.data[4, 1, 1, 0, 3, 7] == 1
    assert cache.data.count_nonzero() == 1


def test_zero_blocks_touches_no_other_block() -> None:
    cache = KVCache(SHAPE, 3, CPU)
    cache.data.fill_(float("nan"))
    cache.zero_blocks([1])
    assert cache.data.isnan().flatten(1).all(dim=1).tolist() == [True, False, True]
    assert cache.data[1].count_nonzero() == 0


@pytest.mark.parametrize(
    ("override", "memory", "available", "expected"),
    [(7, 1, 1, 7), (None, 1050, 1, 10), (None, None, 4000, 10), (None, None, 1 << 40, 42949672)],
)
def test_the_number_of_blocks(
    override: int | None, memory: int | None, available: int, expected: int
) -> None:
    assert decide_num_blocks(100, override, memory, lambda: cpu_budget(available)) == expected


def test_no_room_for_a_single_block_names_both_sizes() -> None:
    with pytest.raises(StartupError, match="a block takes 100 bytes, the KV cache gets 99"):
        decide_num_blocks(100, None, 99, lambda: cpu_budget(1 << 30))
    with pytest.raises(StartupError, match="a quarter of the 200 bytes"):
        decide_num_blocks(100, None, None, lambda: cpu_budget(200))
    with pytest.raises(StartupError, match="at least 1, is 0"):
        decide_num_blocks(100, 0, None, lambda: cpu_budget(1 << 30))


def test_a_gpus_blocks_get_what_its_share_leaves_beside_weights_graphs_and_a_step() -> None:
    budget = gpu_budget(total_bytes=10000, free_bytes=7000, reserved_bytes=500, utilization=0.9)
    assert budget.num_bytes == 9000 - 3000 - 500
    with pytest.raises(StartupError, match="less 60 in use and 7 for a step"):
        decide_num_blocks(100, None, None, lambda: gpu_budget(100, 40, 7, 0.5))


def test_available_memory_is_a_sensible_number() -> None:
    assert 1 << 20 < available_memory() < 1 << 50
