"""Kernels against eager references, with an error bound from float64.

Triton's interpreter multiplies bfloat16 matrices as integers, so attention is tested here in
float32 and float16, and in bfloat16 on a GPU alone (bench.gpu).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.kernel_cases import AttentionCase, attention_sweep
from bench.kernel_row_cases import RotaryCase, RowCase, SamplingCase
from bench.quantized_cases import QuantizedCase
from core.sampling import SamplingParams
from engine.kernels.decode_attention import choose_num_splits
from engine.kernels.prefill_attention import cut_into_tiles
from engine.quantization.weight import Code

CPU = torch.device("cpu")
PAD = (-1, 1)
RAGGED = ((40, 1), PAD, (0, 1), (129, 1), PAD)
CHUNKS = ((0, 37), (50, 20), (16, 1), (31, 2))
HALF, BRAIN = torch.float16, torch.bfloat16
DECODES = {
    "one program a row": AttentionCase(RAGGED),
    "many programs a row": AttentionCase(RAGGED, num_processors=64),
    "more programs than tiles, padded rows only": AttentionCase((PAD, PAD), num_processors=200),
    "a window, split": AttentionCase(RAGGED, window=70, num_processors=40),
    "a window of one": AttentionCase(RAGGED, window=1, num_processors=8),
    "odd sizes": AttentionCase(RAGGED, num_heads=7, num_kv_heads=1, head_dim=24, block_size=4),
    "no groups, float16": AttentionCase(RAGGED, num_kv_heads=4, head_dim=80, dtype=HALF),
    "blocks of 64": AttentionCase(RAGGED, block_size=64, head_dim=128, num_processors=16),
    "fp8, split": AttentionCase(RAGGED, num_processors=64, is_fp8=True),
    "fp8 in float16, a window": AttentionCase(RAGGED, window=70, dtype=HALF, is_fp8=True),
    "fp8, odd sizes": AttentionCase(RAGGED, 7, 1, head_dim=24, block_size=4, is_fp8=True),
}
PREFILLS = {
    "chunks": AttentionCase(CHUNKS),
    "chunks after decodes": AttentionCase((*RAGGED, *CHUNKS), num_processors=16),
    "a window": AttentionCase(CHUNKS, window=17, block_size=32),
    "a wide group": AttentionCase(CHUNKS, num_heads=16, num_kv_heads=1, head_dim=16),
    "odd sizes": AttentionCase(CHUNKS, num_heads=9, num_kv_heads=3, head_dim=24, block_size=4),
    "no groups, float16": AttentionCase(CHUNKS, num_kv_heads=4, head_dim=96, dtype=HALF),
    "blocks of 64": AttentionCase(CHUNKS, block_size=64, head_dim=256, dtype=HALF),
    "fp8 after decodes": AttentionCase((*RAGGED, *CHUNKS), num_processors=16, is_fp8=True),
    "fp8 in float16, a window": AttentionCase(
        CHUNKS, window=17, block_size=32, dtype=HALF, is_fp8=True
    ),
}
ROWS = {
    "rotation": RotaryCase(has_norms=False),
    "rotation with norms": RotaryCase(head_dim=128, num_heads=32, num_kv_heads=8, dtype=BRAIN),
    "rotation, odd sizes": RotaryCase(num_heads=7, num_kv_heads=1, head_dim=24, block_size=4),
    "norm": RowCase("norm", 576),
    "norm, bfloat16": RowCase("norm", 640, BRAIN),
    "gate": RowCase("gate", 1536, HALF),
    "gate, bfloat16": RowCase("gate", 100, BRAIN),
}
QUANTIZED = {
    "int8": QuantizedCase(Code.INT8),
    "int8, many rows": QuantizedCase(Code.INT8, num_rows=70, dtype=HALF),
    "int8, groups with zeros": QuantizedCase(Code.INT8, group_size=32),
    "fp8 by bits": QuantizedCase(Code.FP8),
    "fp8 by bits, float16": QuantizedCase(Code.FP8, num_rows=20, dtype=HALF),
    "fp8 in blocks, the last smaller": QuantizedCase(Code.FP8, num_inputs=112, group_size=48),
    "fp8 of the device": QuantizedCase(Code.FP8, has_fp8=True),
    "int4, groups": QuantizedCase(Code.INT4, group_size=32),
    "int4, many rows": QuantizedCase(Code.INT4, num_rows=150, group_size=32, dtype=HALF),
    "int4, one group, odd sizes": QuantizedCase(Code.INT4, num_inputs=90, num_outputs=33),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("decode", DECODES),
        ("prefill", PREFILLS),
        ("rows", ROWS),
        ("quantized", QUANTIZED),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_errs_little_more_than_its_reference(name: str) -> None:
    errors = CASES[name].run(CPU)
    assert errors.is_within, errors


@pytest.mark.slow
@pytest.mark.parametrize("case", attention_sweep((torch.float32, HALF)), ids=str)
def test_attention_of_every_shape_errs_little_more_than_its_reference(case: AttentionCase) -> None:
    errors = case.run(CPU)
    assert errors.is_within, errors


@pytest.mark.parametrize("step", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_are_those_of_the_sampler(dtype: torch.dtype, step: float) -> None:
    tokens, expected = SamplingCase(dtype=dtype, step=step).run(CPU)
    assert tokens == expected


def test_the_smallest_temperatures_draw_the_largest_logit() -> None:
    cold = SamplingParams(max_tokens=1, temperature=2.0**-149)
    tokens, expected = SamplingCase(params=(cold, replace(cold, top_k=5, top_p=0.9))).run(CPU)
    assert tokens == expected


def test_logits_that_are_not_finite_give_no_token() -> None:
    tokens, _ = SamplingCase(vocab_size=50, scale=float("inf")).run(CPU)
    assert tokens == [-1] * 8


def test_few_rows_are_split_until_every_processor_has_work() -> None:
    assert [choose_num_splits(rows, 8, 132) for rows in (1, 8, 16, 64)] == [33, 4, 2, 1]


def test_long_contexts_of_one_row_are_split_into_64_parts_at_most() -> None:
    assert choose_num_splits(1, 1, 132) == 64


def test_chunks_are_cut_into_tiles_latest_tokens_first() -> None:
    assert cut_into_tiles([5, 1], 2) == [(0, 4), (0, 2), (0, 0), (1, 0)]
