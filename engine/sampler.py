"""Chooses the next token of each row of logits.

The order: logit biases, repetition penalty, presence and frequency penalties, minimum length,
and then either the largest logit (temperature 0) or temperature, top_k, top_p, min_p and one
draw.

The draw takes one number in (0, 1) made from (seed, output index) alone and walks the
cumulative distribution. Rows that draw are treated one by one, so a token can depend on
nothing else in the batch, and a retry of the same request draws the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows

import torch

from core.sampling import SamplingParams
from engine.batch import Logprobs, SampledToken, ScheduledSequence

_MASK_64 = (1 << 64) - 1
_NUM_CANDIDATES = 1024
"""How many of the largest logits top_p sorts before it sorts them all."""


Largest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`DecoderOps.largest`."""


def _largest_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = logits.max(dim=-1)
    return values, indices


def sample(
    logits: torch.Tensor, items: Rows[ScheduledSequence], largest_of: Largest = _largest_of_rows
) -> list[SampledToken | None]:
    """The token that follows each item. `logits`: [items, vocab_size], of any floating dtype.

    A row whose largest logit is not finite gets None: no token follows from it.
    """
    largest, greedy_ids = largest_of(logits)
    is_finite: list[bool] = torch.isfinite(largest).tolist()
    token_ids: list[int] = greedy_ids.tolist()
    sampled: list[SampledToken | None] = []
    for row, item in enumerate(items):
        if not is_finite[row]:
            sampled.append(None)
            continue
        token_id = token_ids[row]
        params = item.sequence.sampling
        if _needs_more_than_argmax(item):
            token_id = _choose(logits[row], item, params.seed)
        logprobs = _logprobs(logits[row], token_id, params.logprobs)
        sampled.append(SampledToken(token_id, logprobs))
    return sampled


def sample_siblings(logits: torch.Tensor, item: ScheduledSequence) -> tuple[SampledToken, ...]:
    """One token for each of the sequence's `sibling_seeds`, from one row [vocab_size].

    Each is the token that the sequence itself would get with that seed.
    """
    tokens = []
    for seed in item.sequence.sibling_seeds:
        token_id = _choose(logits, item, seed)
        logprobs = _logprobs(logits, token_id, item.sequence.sampling.logprobs)
        tokens.append(SampledToken(token_id, logprobs))
    return tuple(tokens)


def uniform(seed: int, output_index: int) -> float:
    """A number in (0, 1) that depends on the two arguments alone.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), seeded by the mixed seed and advanced to
    `output_index`; 52 bits of it, centred, so that neither 0 nor 1 occurs.
    """
    state = _mix(seed & _MASK_64) + (output_index + 1) * 0x9E3779B97F4A7C15
    return ((_mix(state & _MASK_64) >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _needs_more_than_argmax(item: ScheduledSequence) -> bool:
    params = item.sequence.sampling
    return (
        not params.is_greedy
        or bool(params.logit_bias)
        or params.has_penalties
        or item.output_index < params.min_tokens
    )


def _choose(logits: torch.Tensor, item: ScheduledSequence, seed: int) -> int:
    """The token of one row [vocab_size]."""
    params, output_index = item.sequence.sampling, item.output_index
    logits = logits.to(torch.float64, copy=True)
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        logits[list(token_ids)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if params.has_penalties:
        _penalize(logits, item)
    if output_index < params.min_tokens:
        ends = {*params.eos_token_ids, *params.stop_token_ids}
        logits[[token_id for token_id in ends if token_id < len(logits)]] = float("-inf")
    if params.is_greedy:
        return int(logits.argmax())
    return draw(logits, params, uniform(seed, output_index))


def _penalize(logits: torch.Tensor, item: ScheduledSequence) -> None:
    """In place. Repetition: CTRL (Keskar et al., arXiv 1909.05858), section 4.1."""
    sequence, params = item.sequence, item.sequence.sampling
    if params.repetition_penalty != 1.0:
        history = {*sequence.prompt_token_ids, *sequence.output_token_ids}
        seen = torch.tensor(sorted(history), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * factor, values / factor)
    if counts := Counter(sequence.output_token_ids):
        tokens = torch.tensor(list(counts), device=logits.device)
        numbers = torch.tensor(list(counts.values()), device=logits.device)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * numbers


def draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """The token of one row (float64 [vocab_size]) to which `number` in (0, 1) falls.

    With top_k or top_p, tokens lie in falling order of their logit (equal ones by id),
    else by id.
    """
    scaled = (logits - logits.max()) / params.temperature
    token_ids: torch.Tensor | None = None
    if params.top_k > 0 or params.top_p < 1.0:
        scaled, token_ids = _top(scaled, params.top_k, params.top_p)
    probabilities = scaled.softmax(dim=-1)
    if params.min_p > 0.0:
        limit = params.min_p * probabilities.max()
        probabilities = probabilities.masked_fill(probabilities < limit, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    return index if token_ids is None else int(token_ids[index])


def _top(scaled: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids of the tokens that top_k, then top_p, leave; largest first.

    top_p keeps the shortest such prefix that holds at least that share of what top_k left.
    """
    if 0 < top_k < len(scaled):
        values, token_ids = _largest(scaled, top_k)
        return _nucleus(values, token_ids, values.logsumexp(dim=-1), top_p)
    total = scaled.logsumexp(dim=-1)
    if len(scaled) > _NUM_CANDIDATES:
        values, token_ids = _largest(scaled, _NUM_CANDIDATES)
        if float((values.logsumexp(dim=-1) - total).exp()) >= top_p:
            return _nucleus(values, token_ids, total, top_p)
    values, token_ids = scaled.sort(descending=True, stable=True)
    return _nucleus(values, token_ids, total, top_p)


def _largest(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest, in order, equal ones by id (which topk alone leaves open)."""
    limit = scaled.topk(count).values[-1]
    token_ids = torch.nonzero(scaled >= limit).flatten()
    values, order = scaled[token_ids].sort(descending=True, stable=True)
    return values[:count], token_ids[order[:count]]


def _nucleus(
    values: torch.Tensor, token_ids: torch.Tensor, total: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if top_p >= 1.0:
        return values, token_ids
    cumulative = (values - total).exp().cumsum(dim=-1)
    count = int(torch.searchsorted(cumulative, top_p)) + 1
    return values[:count], token_ids[:count]


def _logprobs(logits: torch.Tensor, token_id: int, num_top: int | None) -> Logprobs | None:
    """Of the model's own distribution: before penalties and temperature."""
    if num_top is None:
        return None
    logprobs = logits.float().log_softmax(dim=-1)
    values, token_ids = logprobs.topk(min(num_top, len(logprobs)))
    return Logprobs(
        chosen=float(logprobs[token_id]),
        top=tuple(zip(token_ids.tolist(), values.tolist(), strict=True)),
    )
