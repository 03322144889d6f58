"""Tensors that share a mapping."""

from __future__ import annotations

import torch

from engine.memory import Arena


def test_tensors_of_an_arena_are_zero_begin_with_cache_lines_and_do_not_overlap() -> None:
    arena = Arena(torch.bfloat16)
    tensors = [arena.take(count) for count in (33, 1, 40 << 20, 7)]
    assert [len(tensor) for tensor in tensors] == [33, 1, 40 << 20, 7]
    for number, tensor in enumerate(tensors, start=1):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor[:7].any()
        tensor.fill_(number)
    assert [float(tensor[-1]) for tensor in tensors] == [1, 2, 3, 4]
    assert [float(tensor[0]) for tensor in tensors] == [1, 2, 3, 4]
