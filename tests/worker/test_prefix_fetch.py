"""A prefill worker takes a prefix over that another worker has computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtransfer.link import LinkEstimate
from prefill_svc.prefix_fetch import is_cheaper
from tests.engine.harness import make_prompt
from tests.worker.prefixes import Fetches, held_by, two_pairs


@pytest.mark.parametrize(
    ("compute_s", "cheaper"), [(0.1, False), (0.103, False), (0.104, True), (5.0, True)]
)
def test_fetching_is_cheaper_when_the_bytes_and_two_messages_take_less_than_computing(
    compute_s: float, cheaper: bool
) -> None:
    link = LinkEstimate(bytes_per_s=1e6, overhead_s=1e-3)
    assert is_cheaper(100_000, link, compute_s) is cheaper


def test_what_is_not_known_yet_is_tried() -> None:
    assert is_cheaper(100_000, LinkEstimate(), compute_s=1e-6)
    assert is_cheaper(100_000, LinkEstimate(bytes_per_s=1.0), compute_s=0.0)


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_a_prefix_of_another_prefill_worker_is_not_computed_again(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 4))
        assert result.output == expected(prompt)
        # The last token is computed, for its logits, and into a block of its own.
        assert result.cached_tokens == 48


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_a_conversation_goes_on_with_what_a_decode_worker_holds_of_it(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (one, two):
        prompt = make_prompt(40)
        answer = await one.generate(prompt, "first turn", max_tokens=30)
        prompt += [*answer.output, *make_prompt(10)]
        result = await two.generate(prompt, "second turn", source=held_by(one.decode, 4))
        assert result.output == expected(prompt)
        assert result.cached_tokens == 64


@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucxx"])
async def test_the_partner_of_a_hand_off_may_be_the_source(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async with two_pairs(folder, monkeypatch, transport) as (_, two):
        prompt = make_prompt(40)
        answer = await two.generate(prompt, "first turn", max_tokens=30)
        prompt += [*answer.output, *make_prompt(10)]
        result = await two.generate(prompt, "second turn", source=held_by(two.decode, 4))
        assert result.output == expected(prompt)
        assert (result.cached_tokens, result.transferred_blocks) == (64, 1)


async def test_only_what_is_missing_is_fetched_and_no_more_than_the_source_seems_to_hold(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(150)
        await one.generate(prompt, "first")
        await two.generate(prompt[:40], "beginning")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 7))
        assert result.output == expected(prompt)
        assert (fetches.num_wanted, result.cached_tokens) == ([5], 112)


async def test_a_source_that_holds_less_than_was_thought_gives_what_it_has(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(100)
        await one.generate(prompt[:40], "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 6))
        assert result.output == expected(prompt)
        assert result.cached_tokens == 32


async def test_prompts_that_share_a_prefix_fetch_it_once(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prefix = make_prompt(64)
        await one.generate(prefix, "first")
        prompts = [prefix + make_prompt(20, seed) for seed in range(4)]
        results = await asyncio.gather(
            *(
                two.generate(prompt, f"r{index}", source=held_by(one.prefill, 4))
                for index, prompt in enumerate(prompts)
            )
        )
        assert [result.output for result in results] == [expected(prompt) for prompt in prompts]
        assert [result.cached_tokens for result in results] == [64] * 4
        assert fetches.num_wanted == [4]


async def test_a_prefix_larger_than_the_room_for_fetches_comes_in_portions(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    second = {"num_gpu_blocks_override": 12}
    async with two_pairs(folder, monkeypatch, second=second) as (one, two):
        prompt = make_prompt(125)
        await one.generate(prompt, "first")
        result = await two.generate(prompt, "again", source=held_by(one.prefill, 7))
        assert result.output == expected(prompt)
        assert (fetches.num_wanted, result.cached_tokens) == ([3, 3, 1], 112)


async def test_a_prompt_with_log_probabilities_of_its_own_is_computed_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first")
        source = held_by(one.prefill, 4)
        result = await two.generate(prompt, "scored", source=source, prompt_logprobs=0)
        assert len(result.prompt_logprobs) == 63
        assert fetches.num_wanted == []


async def test_prompts_of_another_tenant_find_nothing(
    folder: Path, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pairs(folder, monkeypatch) as (one, two):
        prompt = make_prompt(64)
        await one.generate(prompt, "first", hash_salt="a")
        source = held_by(one.prefill, 4)
        result = await two.generate(prompt, "again", source=source, hash_salt="b")
        assert (result.output, result.cached_tokens) == (expected(prompt), 0)
