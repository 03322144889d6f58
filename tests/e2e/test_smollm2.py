"""The main job: a real model through router, prefill, transfer and decode."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from tests.e2e.conftest import Reference
from tests.e2e.stack import RunningStack, run_baton, running_stack

# The reference alone takes a minute on a quiet machine.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

LENGTHS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 250, 511, 512, 900, 1500)
NUM_OUTPUTS = 16

SENTENCES = (
    "The river had risen during the night and now covered the lower meadow.",
    "In 1911 the expedition reached the plateau with four sledges and nineteen dogs.",
    "To prove the lemma, assume that the sequence is bounded and take a subsequence.",
    "Mix the flour with a pinch of salt, then add the butter in small pieces.",
    "The committee could not agree on the budget, so the vote was postponed until March.",
    "A hash table keeps its entries in buckets; collisions are resolved by chaining.",
    "She closed the window, lit the lamp, and began to read the letter for the third time.",
    "Copper conducts electricity better than iron because its electrons move more freely.",
    "Our train leaves at seven from platform nine; please bring warm clothes.",
    "The old violin was worth more than the house in which it had been found.",
)


@pytest.fixture(scope="module")
def stack(smollm2: Path) -> Iterator[RunningStack]:
    # Small steps, so that long prompts take several chunks.
    args = ("--dtype", "float32", "--max-num-batched-tokens", "256")
    with running_stack(smollm2, "--kv-transport", "nixl", *args) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """One prompt of each length, all of different text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))

    def prompt(length: int) -> list[int]:
        text = " ".join(random.Random(length).choices(SENTENCES, k=length // 8 + 3))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:length]

    made = [prompt(length) for length in LENGTHS]
    assert [len(ids) for ids in made] == list(LENGTHS)
    return made


def test_it_knows_the_capital_of_france(stack: RunningStack) -> None:
    done = run_baton(
        "generate",
        "--server",
        stack.address,
        "--chat",
        "--prompt",
        "What is the capital of France?",
    )
    assert done.returncode == 0
    assert "Paris" in done.stdout


def test_tokens_equal_those_of_transformers_alone_cached_and_sixteen_at_a_time(
    stack: RunningStack, prompts: list[list[int]], smollm2_reference: Reference
) -> None:
    expected = [smollm2_reference(prompt, NUM_OUTPUTS) for prompt in prompts]
    alone = [stack.greedy(prompt, NUM_OUTPUTS) for prompt in prompts]
    assert [answer.token_ids for answer in alone] == expected

    again = [stack.greedy(prompt, NUM_OUTPUTS) for prompt in prompts]
    assert [answer.token_ids for answer in again] == expected
    for prompt, answer in zip(prompts, again, strict=True):
        # At most one block is computed again, and decode holds every full block already.
        assert answer.route.cached_tokens == (len(prompt) - 1) // 16 * 16
        assert answer.route.transferred_blocks <= 1

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: stack.greedy(prompt, NUM_OUTPUTS), prompts))
    assert [answer.token_ids for answer in together] == expected
    stack.wait_until_idle()


def test_a_hundred_requests_at_once_all_finish_right(
    stack: RunningStack, prompts: list[list[int]], smollm2_reference: Reference
) -> None:
    # Each prompt of the other test, whose reference is there already, and 79 short ones.
    short = [prompt[:length] for prompt in prompts[9:] for length in (3, 20, 60)][:20]
    work = [*prompts, *(short * 4)][:100]
    random.Random(0).shuffle(work)
    expected = {tuple(p): smollm2_reference(p, NUM_OUTPUTS) for p in work}
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda prompt: stack.greedy(prompt, NUM_OUTPUTS), work))
    assert [a.token_ids for a in answers] == [expected[tuple(p)] for p in work]
    stack.wait_until_idle()
    done = run_baton("status", "--server", stack.address, "--audit")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    stack: RunningStack, prompts: list[list[int]]
) -> None:
    def sample(prompt: list[int]) -> list[int]:
        with stack.client() as client:
            answer = client.generate(
                token_ids=prompt, max_tokens=24, temperature=0.9, top_p=0.95, seed=11
            )
        return list(answer.token_ids)

    some = prompts[2:14]
    alone = [sample(prompt) for prompt in some]
    with ThreadPoolExecutor(len(some)) as pool:
        assert list(pool.map(sample, some)) == alone
