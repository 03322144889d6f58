"""Hand-off of KV in fp8."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import BatonError
from tests.engine.harness import make_engine, make_prompt, run_prompts
from tests.worker.pair import pair

FP8: dict[str, object] = {"kv_cache_dtype": "fp8"}


async def test_tokens_equal_those_of_one_engine_at_every_block_boundary(folder: Path) -> None:
    prompts = [make_prompt(length) for length in (1, 15, 16, 17, 50)]
    expected = run_prompts(make_engine(folder, kv_cache_dtype="fp8"), prompts)
    async with pair(folder, prefill={**FP8, "max_num_batched_tokens": 64}, decode=FP8) as both:
        for prompt, tokens in zip(prompts, expected, strict=True):
            result = await both.generate(prompt, f"r{len(prompt)}", max_tokens=12)
            assert result.output == tokens
            assert result.transferred_blocks == -(-len(prompt) // 16)


async def test_a_pod_with_another_kv_dtype_is_refused(folder: Path) -> None:
    async with pair(folder, decode=FP8) as both:
        with pytest.raises(BatonError, match="LKHTD1-e4m3"):
            await both.generate(make_prompt(20), "r")
