"""The next token of each row of logits, chosen on the device: no sort, no host round trip.

The same choice as `engine.sampler.draw`: temperature, top_k, top_p, min_p, then one number in
(0, 1) walks the cumulative distribution. Instead of sorting, a search over the bits of the
logits finds where the order is cut: equal logits have equal probabilities, so that a value and a
number of tokens of that value say everything (radix select, as in Alabi et al., "Fast k-selection
algorithms for graphics processing units", 2012). Which of the equal ones it is, counting by id,
a last pass finds. Probabilities are float32 and sums float64, so a draw differs from the
sampler's, all in float64, only where the number falls within rounding of a border.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 2048


@dataclass(frozen=True)
class SamplingRows:
    """How each row is sampled; all [rows], on the device."""

    temperature: torch.Tensor
    """float32; 0 takes the largest logit."""
    top_k: torch.Tensor
    """int32; 0 leaves all."""
    top_p: torch.Tensor
    """float32; 1 leaves all."""
    min_p: torch.Tensor
    """float32; 0 leaves all."""
    number: torch.Tensor
    """float64, in (0, 1): `engine.sampler.uniform`."""


@triton.jit
def _ordered(logits, BITS: tl.constexpr):
    """Floats as integers from 0 to 2**BITS - 1 in the same order; -0 counts as 0."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    ALL: tl.constexpr = (1 << BITS) - 1
    if BITS == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int64) & ALL
    else:
        bits = logits.to(tl.int32, bitcast=True).to(tl.int64) & ALL
    return tl.where(bits > SIGN, ALL - bits, (bits & (SIGN - 1)) + SIGN)


@triton.jit
def _masses(logits, ids, maximum, inverse_temperature, SIZE: tl.constexpr):
    """Unnormalized probabilities; the largest logit's is 1."""
    scaled = (logits.to(tl.float32) - maximum) * inverse_temperature
    return tl.where(ids < SIZE, tl.exp(scaled), 0.0)


@triton.jit
def _value_at(
    row_ptr,
    target,
    maximum,
    inverse_temperature,
    COUNTS: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest ordered value such that tokens of it or above weigh `target` or more.

    With COUNTS each weighs 1, else its mass. Two bits a pass.
    """
    found = tl.zeros([], tl.int64)
    for step in range(BITS // 2):
        unit = tl.full([], 1, tl.int64) << (BITS - 2 - 2 * step)
        one = tl.zeros([], tl.float64)
        two = tl.zeros([], tl.float64)
        three = tl.zeros([], tl.float64)
        for start in range(0, SIZE, TILE):
            ids = start + tl.arange(0, TILE)
            logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf"))
            values = _ordered(logits, BITS)
            if COUNTS:
                weights = tl.where(ids < SIZE, 1.0, 0.0).to(tl.float64)
            else:
                masses = _masses(logits, ids, maximum, inverse_temperature, SIZE)
                weights = masses.to(tl.float64)
            one += tl.sum(tl.where(values >= found + unit, weights, 0.0), 0)
            two += tl.sum(tl.where(values >= found + 2 * unit, weights, 0.0), 0)
            three += tl.sum(tl.where(values >= found + 3 * unit, weights, 0.0), 0)
        digit = (one >= target).to(tl.int64) + (two >= target) + (three >= target)
        found += digit * unit
    return found


@triton.jit
def _weigh(
    row_ptr,
    value,
    maximum,
    inverse_temperature,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Above `value`: number of tokens and their mass; of `value`: their number, one's mass."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.float64)
    num_equal = tl.zeros([], tl.int64)
    unit = tl.zeros([], tl.float32)
    for start in range(0, SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf"))
        values = _ordered(logits, BITS)
        masses = _masses(logits, ids, maximum, inverse_temperature, SIZE)
        count += tl.sum(((values > value) & (ids < SIZE)).to(tl.int64), 0)
        mass += tl.sum(tl.where(values > value, masses, 0.0).to(tl.float64), 0)
        is_equal = (values == value) & (ids < SIZE)
        num_equal += tl.sum(is_equal.to(tl.int64), 0)
        unit = tl.maximum(unit, tl.max(tl.where(is_equal, masses, 0.0), 0))
    return count, mass, num_equal, unit


@triton.jit
def _nth_equal(row_ptr, value, nth, SIZE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    """The id of the nth token, from 0 on, whose ordered logit is `value`."""
    found = tl.full([], SIZE, tl.int32)
    before = tl.zeros([], tl.int64)
    for start in range(0, SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf"))
        is_equal = ((_ordered(logits, BITS) == value) & (ids < SIZE)).to(tl.int64)
        ranks = before + tl.cumsum(is_equal, 0) - 1
        is_nth = (is_equal == 1) & (ranks == nth)
        found = tl.minimum(found, tl.min(tl.where(is_nth, ids, SIZE), 0))
        before += tl.sum(is_equal, 0)
    return found


@triton.jit
def _mass_of(row_ptr, limit, maximum, inverse_temperature, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The sum of all masses of at least `limit`."""
    total = tl.zeros([], tl.float64)
    for start in range(0, SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf"))
        masses = _masses(logits, ids, maximum, inverse_temperature, SIZE)
        total += tl.sum(tl.where(masses >= limit, masses, 0.0).to(tl.float64), 0)
    return total


@triton.jit
def _walk(
    row_ptr, number, limit, maximum, inverse_temperature, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """By id: the first token at which the masses of at least `limit` pass their share."""
    target = number * _mass_of(row_ptr, limit, maximum, inverse_temperature, SIZE, TILE)
    found = tl.full([], SIZE, tl.int32)
    last = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    for start in range(0, SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf"))
        masses = _masses(logits, ids, maximum, inverse_temperature, SIZE)
        kept = tl.where(masses >= limit, masses, 0.0).to(tl.float64)
        is_past = (before + tl.cumsum(kept, 0) > target) & (kept > 0.0)
        found = tl.minimum(found, tl.min(tl.where(is_past, ids, SIZE), 0))
        last = tl.maximum(last, tl.max(tl.where(kept > 0.0, ids, 0), 0))
        before += tl.sum(kept, 0)
    # Summed in another order the whole may fall short of the target by a rounding.
    return tl.where(found < SIZE, found, last)


@triton.jit
def sample_kernel(
    token_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    number_ptr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row. -1 where its largest logit is not finite."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * SIZE
    maximum = tl.full([], float("-inf"), tl.float32)
    num_nan = tl.zeros([], tl.int32)
    for start in range(0, SIZE, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum((logits != logits).to(tl.int32), 0)
        maximum = tl.maximum(maximum, tl.max(logits, 0))
    if (num_nan > 0) | (maximum == float("inf")) | (maximum == float("-inf")):
        tl.store(token_ptr + row, -1)
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    number = tl.load(number_ptr + row)
    if temperature == 0.0:
        largest = tl.max(_ordered(maximum.to(logits_ptr.dtype.element_ty)[None], BITS), 0)
        tl.store(token_ptr + row, _nth_equal(row_ptr, largest, 0, SIZE, BITS, TILE))
        return
    # Of less it would be infinite, and the largest logit's mass no number.
    inverse = 1.0 / tl.maximum(temperature, 1e-30)
    has_top_k = (top_k > 0) & (top_k < SIZE)
    if (not has_top_k) & (top_p >= 1.0):
        token = _walk(row_ptr, number, min_p, maximum, inverse, SIZE, TILE)
        tl.store(token_ptr + row, token)
        return
    # What is kept: all above `cut`, of mass `above`, and `num_kept` of those equal to it.
    cut = tl.full([], -1, tl.int64)
    if has_top_k:
        cut = _value_at(row_ptr, top_k, maximum, inverse, True, SIZE, BITS, TILE)
    count, above, num_equal, unit = _weigh(row_ptr, cut, maximum, inverse, SIZE, BITS, TILE)
    num_kept = tl.where(has_top_k, top_k - count, 0)
    if top_p < 1.0:
        target = tl.maximum((above + num_kept * unit.to(tl.float64)) * top_p, 1e-300)
        value = _value_at(row_ptr, target, maximum, inverse, False, SIZE, BITS, TILE)
        count, above, num_equal, unit = _weigh(row_ptr, value, maximum, inverse, SIZE, BITS, TILE)
        num_needed = tl.ceil((target - above).to(tl.float32) / unit).to(tl.int64)
        num_needed = tl.maximum(num_needed, 1)
        num_kept = tl.minimum(num_needed, tl.where(value == cut, num_kept, num_equal))
        cut = value
    total = above + num_kept * unit.to(tl.float64)
    if unit < min_p:
        total = _mass_of(row_ptr, min_p, maximum, inverse, SIZE, TILE)
    target = number * total
    value = _value_at(row_ptr, target, maximum, inverse, False, SIZE, BITS, TILE)
    count, above, num_equal, unit = _weigh(row_ptr, value, maximum, inverse, SIZE, BITS, TILE)
    num_equal = tl.where(value == cut, num_kept, num_equal)
    nth = tl.minimum(((target - above).to(tl.float32) / unit).to(tl.int64), num_equal - 1)
    token = _nth_equal(row_ptr, value, tl.maximum(nth, 0), SIZE, BITS, TILE)
    tl.store(token_ptr + row, token)


def sample_rows(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Token ids int32 [rows] of contiguous logits [rows, vocab_size].

    -1 where a row's largest logit is not finite.
    """
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    sample_kernel[(num_rows,)](
        tokens,
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.number,
        SIZE=size,
        BITS=8 * logits.dtype.itemsize,
        TILE=_TILE,
        num_warps=16,
    )
    return tokens
