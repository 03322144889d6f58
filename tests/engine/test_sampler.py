"""Sampling against plain definitions, transformers' processors, and statistics."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers

from core.sampling import SamplingParams
from engine.batch import ScheduledSequence
from engine.sampler import draw, sample, sample_siblings, uniform
from engine.sequence import Sequence
from tests.engine.harness import make_prompt, make_sequence

VOCAB_SIZE = 40


def make_logits(rows: int = 1, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, vocab_size, generator=generator)


def items_of(*sequences: Sequence) -> list[ScheduledSequence]:
    """The steps that compute the newest token of each."""
    return [ScheduledSequence.of(each, each.num_tokens - 1, 1) for each in sequences]


def sample_one(logits: torch.Tensor, outputs: list[int], **sampling: object) -> int:
    sequence = make_sequence([1, 2, 2, 3], 50, **sampling)
    sequence.output_token_ids = outputs
    return sample(logits.view(1, -1), items_of(sequence))[0].token_id


def plain_distribution(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """Token id -> probability, by the definition, one token at a time."""
    scaled = (logits.double() / params.temperature).softmax(-1).tolist()
    ordered = sorted(enumerate(scaled), key=lambda pair: (-pair[1], pair[0]))
    if params.top_k:
        ordered = ordered[: params.top_k]
    total = sum(p for _, p in ordered)
    kept: list[tuple[int, float]] = []
    for token_id, p in ordered:
        if params.top_p < 1 and sum(q for _, q in kept) / total >= params.top_p:
            break
        kept.append((token_id, p))
    kept = [(token_id, p) for token_id, p in kept if p >= params.min_p * kept[0][1]]
    total = sum(p for _, p in kept)
    return {token_id: p / total for token_id, p in kept}


def test_greedy_takes_the_largest_logit_of_each_row() -> None:
    logits = make_logits(5)
    tokens = sample(logits, items_of(*[make_sequence([1]) for _ in range(5)]))
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.3},
        {"temperature": 3.0, "top_k": 100},
    ],
)
def test_the_draw_follows_the_plain_definition(settings: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=1, **{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    logits = make_logits()[0]
    expected = plain_distribution(logits, params)
    steps = 4000
    counts = Counter(draw(logits.double(), params, (i + 0.5) / steps) for i in range(steps))
    assert set(counts) <= set(expected)
    assert max(abs(counts[t] / steps - p) for t, p in expected.items()) < 1.01 / steps


def test_top_p_over_a_large_vocabulary_is_the_same_with_and_without_the_short_cut() -> None:
    for scale in (0.01, 2.0):
        logits = scale * make_logits(vocab_size=5000)[0].double()
        params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
        expected = plain_distribution(logits, params)
        drawn = {draw(logits, params, (i + 0.5) / 200) for i in range(200)}
        assert drawn <= set(expected)
        assert draw(logits, params, 1 - 1e-12) == list(expected)[-1]


def test_equal_logits_are_cut_by_token_id() -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=3)
    logits = torch.zeros(2000, dtype=torch.float64)
    assert {draw(logits, params, (i + 0.5) / 50) for i in range(50)} == {0, 1, 2}


def test_a_token_depends_on_seed_and_index_and_not_on_the_batch() -> None:
    logits = make_logits()[0]
    sampling = {"temperature": 1.5, "top_p": 0.95, "seed": 11}
    alone = [sample_one(logits, [0] * index, **sampling) for index in range(20)]
    others = [make_sequence([1], temperature=0.8, seed=s, top_k=s + 1) for s in range(7)]
    for index, expected in enumerate(alone):
        sequence = make_sequence([1], 50, **sampling)
        sequence.output_token_ids = [0] * index
        rows = torch.cat((make_logits(7, seed=index), logits[None]))
        assert sample(rows, items_of(*others, sequence))[-1].token_id == expected
    assert len(set(alone)) > 5
    assert alone != [sample_one(logits, [0] * i, **{**sampling, "seed": 12}) for i in range(20)]


def test_uniform_numbers_are_uniform_over_seeds_and_over_indices() -> None:
    for numbers in (
        [uniform(seed, 3) for seed in range(4000)],
        [uniform(2**64 - 1, index) for index in range(4000)],
    ):
        assert all(0 < number < 1 for number in numbers)
        counts = Counter(int(number * 20) for number in numbers)
        chi_square = sum((counts[cell] - 200) ** 2 / 200 for cell in range(20))
        assert chi_square < 43.8  # 0.999 quantile for 19 degrees of freedom


def test_sampled_frequencies_fit_the_distribution() -> None:
    logits = make_logits(seed=5)[0]
    params = SamplingParams(max_tokens=1, temperature=1.2, top_k=12)
    expected = plain_distribution(logits, params)
    draws = 4000
    counts = Counter(draw(logits.double(), params, uniform(s, 0)) for s in range(draws))
    assert set(counts) <= set(expected)
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items())
    assert chi_square < 31.3  # 0.999 quantile for 11 degrees of freedom


def test_an_extreme_temperature_is_greedy_not_nan() -> None:
    logits = make_logits()[0]
    assert sample_one(logits, [], temperature=1e-30, seed=3) == int(logits.argmax())


def test_the_repetition_penalty_equals_that_of_transformers() -> None:
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    for seed in range(30):
        logits, prompt = make_logits(seed=seed), [t % VOCAB_SIZE for t in make_prompt(20, seed)]
        sequence = make_sequence(prompt, repetition_penalty=1.7)
        sequence.output_token_ids = [4, 4, int(logits.argmax())]
        history = torch.tensor([prompt + sequence.output_token_ids])
        expected = int(processor(history, logits.clone()).argmax())
        assert sample(logits, items_of(sequence))[0].token_id == expected


def test_presence_and_frequency_count_outputs_only() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[1, 5, 6, 7]] = torch.tensor([1.0, 3.0, 2.5, 1.8])
    assert sample_one(logits, [5], presence_penalty=0.6) == 6
    assert sample_one(logits, [5], presence_penalty=0.4) == 5
    assert sample_one(logits, [5, 5, 6], frequency_penalty=0.4) == 5
    assert sample_one(logits, [5, 5, 5, 5, 6, 6], frequency_penalty=0.4) == 7
    assert sample_one(logits, [], presence_penalty=2.0, frequency_penalty=2.0) == 5


def test_a_logit_bias_is_added_before_all_else_also_when_greedy() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[1, 5, 6]] = torch.tensor([1.0, 3.0, 2.5])
    assert sample_one(logits, [], logit_bias=((6, 0.6),)) == 6
    assert sample_one(logits, [], logit_bias=((5, -100.0), (6, -100.0))) == 1
    assert sample_one(logits, [], temperature=1.0, logit_bias=((9, 100.0),)) == 9
    # The penalty divides what the bias has made of the logit: 3.5 / 2 < 2.5.
    assert sample_one(logits, [5], logit_bias=((5, 0.5),), repetition_penalty=2.0) == 6
    assert sample_one(logits, [], logit_bias=((6, 1.0),), eos_token_ids=(6,), min_tokens=1) == 5


def test_siblings_are_what_the_sequence_would_get_with_their_seeds() -> None:
    logits = make_logits()[0]
    sampling = {"temperature": 2.0, "top_k": 30, "repetition_penalty": 1.3, "logprobs": 2}
    sequence = make_sequence([1, 2, 3], **sampling)
    sequence.sibling_seeds = (0, 5, 2**64 - 1)
    expected = [
        sample(logits[None], items_of(make_sequence([1, 2, 3], seed=seed, **sampling)))[0]
        for seed in sequence.sibling_seeds
    ]
    assert list(sample_siblings(logits, items_of(sequence)[0])) == expected
    assert len({token.token_id for token in expected}) == 3


def test_the_callers_logits_are_left_alone() -> None:
    logits = make_logits().double()
    before = logits.clone()
    sample(logits, items_of(make_sequence([1], logit_bias=((3, 5.0),), repetition_penalty=2.0)))
    assert torch.equal(logits, before)


def test_the_end_is_out_of_reach_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[3, 4, 9]] = torch.tensor([3.0, 2.0, 1.0])
    ends = {"min_tokens": 2, "eos_token_ids": (3,), "stop_token_ids": (4, 1000)}
    assert sample_one(logits, [], **ends) == 9
    assert sample_one(logits, [0], **ends) == 9
    assert sample_one(logits, [0, 0], **ends) == 3


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits()
    sequence = make_sequence(
        [1], temperature=0.5, top_k=1, repetition_penalty=3.0, logit_bias=((7, 9.0),), logprobs=3
    )
    token = sample(logits, items_of(sequence))[0]
    expected = logits[0].log_softmax(-1)
    assert token.logprobs is not None
    assert token.logprobs.chosen == pytest.approx(float(expected[token.token_id]))
    assert [t for t, _ in token.logprobs.top] == expected.topk(3).indices.tolist()
    assert [p for _, p in token.logprobs.top] == pytest.approx(expected.topk(3).values.tolist())


def test_zero_logprobs_give_the_chosen_one_alone() -> None:
    token = sample(make_logits(), items_of(make_sequence([1], logprobs=0)))[0]
    assert token.logprobs is not None
    assert token.logprobs.top == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token_and_harm_no_other_row(value: float) -> None:
    logits = make_logits(3)
    logits[1, 7] = value
    tokens = sample(logits, items_of(*[make_sequence([1]) for _ in range(3)]))
    assert tokens[1] is None
    assert [tokens[row].token_id for row in (0, 2)] == logits[[0, 2]].argmax(dim=-1).tolist()
