"""KV in fp8: its layout, what it costs in accuracy, and that it changes no rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.errors import StartupError
from engine.attention import GatherAttention, SequenceChunk
from engine.engine import Engine, EngineConfig, load_engine
from engine.fp8 import dequantize, quantize
from engine.kv_cache import BlockShape, KVCache
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, make_sequence, run, run_prompts

CPU = torch.device("cpu")
SHAPE = BlockShape(
    num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16, is_fp8=True
)
PROMPTS = [make_prompt(length) for length in (1, 16, 17, 33, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("model"), "llama")


def make_fp8_engine(folder: Path, **settings: object) -> Engine:
    return make_engine(folder, kv_cache_dtype="fp8", **settings)


def test_a_number_is_off_by_a_sixteenth_of_itself_or_the_least_of_its_row() -> None:
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) ** 3
    bits, scales = quantize(rows)
    error = (dequantize(bits, scales, torch.float32) - rows).abs()
    bound = torch.maximum(rows.abs() / 16, scales[:, None] / 1024) * 1.0001
    assert (error <= bound).all()
    assert dequantize(*quantize(torch.zeros(1, 8)), torch.float32).tolist() == [[0.0] * 8]


def test_rows_too_small_for_a_scale_are_rows_of_zeros() -> None:
    bits, scales = quantize(torch.tensor([[1e-37, 0.0], [0.0, 0.0], [1e-29, 0.0]]))
    found = dequantize(bits, scales, torch.float32)
    assert found[:2].tolist() == [[0.0, 0.0]] * 2
    assert found[2].tolist() == pytest.approx([1e-29, 0.0])


def test_a_layer_is_one_range_of_its_block_scales_included() -> None:
    cache = KVCache(SHAPE, 5, CPU)
    layer_bytes = 2 * 2 * 4 * (8 + 4)
    assert cache.block_bytes == 3 * layer_bytes and cache.data.is_contiguous()
    cache.layer(1)[4, 1, 1, 3] = 255
    cache.scales(1)[4] = 1.0
    written = cache.data.flatten().nonzero().flatten()
    begin = 4 * cache.block_bytes + layer_bytes
    assert begin <= written.min() and written.max() < begin + layer_bytes
    assert cache.layer(1).shape == (5, 2, 2, 4, 8) and cache.scales(1).shape == (5, 2, 2, 4)


def test_the_layout_is_another_than_that_of_a_plain_cache() -> None:
    plain = BlockShape(3, 2, 4, 8, torch.bfloat16)
    assert (plain.layout_name, SHAPE.layout_name) == ("LKHTD1", "LKHTD1-e4m3")


def test_writing_touches_the_rows_of_its_slots_alone() -> None:
    cache = KVCache(SHAPE, 3, CPU)
    step = GatherAttention(cache).prepare([SequenceChunk(5, 1, [1, 2])], [9])
    key_value = torch.ones(1, 2, 2, 8, dtype=torch.bfloat16)
    step.attend(1, torch.ones(1, 4, 8, dtype=torch.bfloat16), key_value, None)
    layer, scales = cache.layer(1), cache.scales(1)
    assert (layer[2, :, :, 1] == 0x7E).all() and (scales[2, :, :, 1] == 1 / 448).all()
    layer[2, :, :, 1], scales[2, :, :, 1] = 0, 0.0
    assert cache.data.count_nonzero() == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_chunks_caches_and_preemption_change_no_token(folder: Path, is_async: bool) -> None:
    expected = run_prompts(make_fp8_engine(folder), PROMPTS)
    chunked = make_fp8_engine(folder, max_num_batched_tokens=13, max_num_seqs=13)
    assert run_prompts(chunked, PROMPTS, is_async=is_async) == expected
    assert run_prompts(chunked, PROMPTS, is_async=is_async) == expected
    assert chunked.pool.stats().cached > 0
    tiny = make_fp8_engine(folder, num_gpu_blocks_override=8, block_size=8, max_model_len=64)
    sequences = [make_sequence(prompt, name=str(len(prompt))) for prompt in PROMPTS[:4]]
    assert run(tiny, sequences, is_async=is_async) == expected[:4]
    assert sum(sequence.num_preemptions for sequence in sequences) > 0


def test_blocks_full_of_nan_from_an_earlier_use_change_nothing(folder: Path) -> None:
    engine = make_fp8_engine(folder)
    engine.kv_cache.data.fill_(0xFF)
    assert run_prompts(engine, PROMPTS) == run_prompts(make_fp8_engine(folder), PROMPTS)


def logits_of(engine: Engine) -> torch.Tensor:
    """After each token of a prompt, float32 [200, vocab_size]."""
    step = engine.runner._attention.prepare(
        [SequenceChunk(0, 200, list(range(13)))], list(range(200))
    )
    decoder = engine.runner.decoder
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(make_prompt(200)), torch.arange(200), step)
        return decoder.logits(hidden)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_logits_of_random_models_stay_near_those_of_an_unquantized_cache(
    tmp_path: Path, name: str
) -> None:
    """Random weights attend sharply and choose between near equals: a real model errs less."""
    folder = tiny_models.build(tmp_path, name)
    exact, approximate = logits_of(make_engine(folder)), logits_of(make_fp8_engine(folder))
    assert (approximate - exact).square().mean().sqrt() <= 0.15 * exact.std()
    assert (approximate.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.8


def test_compiled_attention_makes_way_and_says_so(folder: Path) -> None:
    lines: list[str] = []
    config = EngineConfig(model=folder, kv_cache_dtype="fp8", num_gpu_blocks_override=8)
    engine = load_engine(config, lines.append)
    assert isinstance(engine.runner._attention, GatherAttention)
    if "kernels compiled for this CPU" in lines:
        assert any("a KV cache in fp8 is not supported by others" in line for line in lines)


def test_another_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(StartupError, match="kv_cache_dtype int4 is not supported"):
        make_engine(folder, kv_cache_dtype="int4")
