"""Assembly: how the engine's limits follow from the wishes, and what stops its start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from core.errors import StartupError
from engine.sequence import Sequence
from tests import tiny_models
from tests.engine.harness import (
    make_engine,
    make_prompt,
    make_sequence,
    run,
    run_prompts,
    run_with_logprobs,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.build(tmp_path_factory.mktemp("model"))


def test_the_longest_sequence_is_the_models_context(folder: Path) -> None:
    assert make_engine(folder).max_model_len == 512


def test_the_longest_sequence_is_the_wish_when_that_is_shorter(folder: Path) -> None:
    assert make_engine(folder, max_model_len=100).max_model_len == 100


def test_the_longest_sequence_fits_the_pool(folder: Path) -> None:
    assert make_engine(folder, num_gpu_blocks_override=3).max_model_len == 48


def test_auto_takes_the_dtype_of_the_folder(folder: Path, tmp_path: Path) -> None:
    model = tiny_models.random_model(tiny_models.VARIANTS["llama"])
    model.bfloat16().save_pretrained(tmp_path)
    assert make_engine(tmp_path, dtype="auto").dtype == "bfloat16"
    assert make_engine(folder, dtype="auto").kv_cache.data.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 513}, "max_model_len 513 must be between 1 and .* length 512"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"dtype": "int8"}, "dtype int8 is not supported; supported: auto, float32"),
        ({"device": "tpu"}, "device tpu is not supported; supported: cpu, cuda"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000},
            "no room for a single KV block: a block takes 12288 bytes, the KV cache gets 1000",
        ),
        ({"num_gpu_blocks_override": 1 << 45}, "cannot allocate 35184372088832 KV blocks"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_clear_line(
    folder: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError, match=message) as error:
        make_engine(folder, **settings)
    assert "\n" not in error.value.message


def test_dynamic_rope_ends_at_its_original_length(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, "llama-dynamic")
    assert make_engine(folder).max_model_len == 512
    with pytest.raises(StartupError, match="rope type dynamic"):
        make_engine(folder, max_model_len=1024)


def test_low_precision_logprobs_are_near_those_of_transformers(folder: Path) -> None:
    prompt = make_prompt(40)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for dtype, tolerance in (("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.4)):
        engine = make_engine(folder, dtype=dtype)
        token = run_with_logprobs(engine, make_sequence(prompt, 1, logprobs=20))[0]
        assert token.logprobs is not None
        errors = [abs(float(expected[t]) - value) for t, value in token.logprobs.top]
        assert max(errors) < tolerance


def test_seeded_outputs_do_not_depend_on_what_else_is_in_the_batch(folder: Path) -> None:
    prompts = [make_prompt(length) for length in (5, 20, 33)]

    def sequences() -> list[Sequence]:
        return [
            make_sequence(p, 16, str(i), temperature=1.0, top_p=0.9, seed=i, repetition_penalty=1.1)
            for i, p in enumerate(prompts)
        ]

    together = run(make_engine(folder), sequences())
    alone = [run(make_engine(folder), [s])[0] for s in sequences()]
    assert together == alone


def test_a_retry_with_prior_outputs_goes_on_as_the_first_attempt_would_have(folder: Path) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.5}
    whole = run(make_engine(folder), [make_sequence(make_prompt(20), 16, **sampling)])[0]
    retry = make_sequence(make_prompt(20), 16, **sampling)
    retry.output_token_ids = whole[:7]
    retry.num_prior_outputs = 7
    assert run(make_engine(folder), [retry])[0] == whole


def test_several_threads_and_a_large_prompt_change_no_token(folder: Path) -> None:
    prompts = [make_prompt(300), make_prompt(3)]
    expected = run_prompts(make_engine(folder), prompts)
    try:
        assert run_prompts(make_engine(folder, num_threads=2), prompts) == expected
    finally:
        torch.set_num_threads(1)
