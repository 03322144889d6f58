"""Rotary position embedding and the ways of stretching it.

Rotary embedding: Su et al., RoFormer (arXiv 2104.09864), section 3.2, with the rotated pair
split over the two halves of a head. Scaling: linear (position interpolation, arXiv
2306.15595), yarn (arXiv 2309.00071, sections 3.2 to 3.4), llama3 (the release of Llama 3.1).
`dynamic` changes nothing up to the model's context length, and that is where the engine
stops: beyond it the rotation of earlier tokens would depend on how long the prompt grew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.errors import StartupError

_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_MAX_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RopeConfig:
    """How positions are rotated. Fields past `factor` are read by one type only."""

    head_dim: int
    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """llama3, yarn: context length of the pretraining, in tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosine and sine, so that scores grow by its square."""

    @classmethod
    def from_hf(cls, keys: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta`."""
        if head_dim % 2:
            raise StartupError(f"config.json: head_dim must be even, is {head_dim}")
        scaling = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping):
            raise StartupError(f"config.json: rope_scaling must be an object, is {scaling!r}")
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))
        if rope_type not in _SUPPORTED or any(isinstance(v, Mapping) for v in scaling.values()):
            raise StartupError(
                f"rope type {rope_type!r} of {dict(scaling)} is not supported; "
                f"supported: {', '.join(_SUPPORTED)}"
            )
        for source in (scaling, keys):
            if (source.get("partial_rotary_factor") or 1.0) != 1.0:
                raise StartupError("partial_rotary_factor other than 1 is not supported")
        source = scaling if scaling.get("rope_theta") else keys
        theta = positive_number(source, "rope_theta", _DEFAULT_THETA)
        plain = cls(head_dim=head_dim, theta=theta, rope_type=rope_type)
        if rope_type in ("default", "dynamic"):
            return plain
        source = keys if keys.get("original_max_position_embeddings") else scaling
        original = int(positive_number(source, "original_max_position_embeddings", max_positions))
        if rope_type == "yarn":
            return _read_yarn(plain, scaling, original, max_positions)
        stretched = replace(plain, factor=positive_number(scaling, "factor"))
        if rope_type == "linear":
            return stretched
        return replace(
            stretched,
            original_max_positions=original,
            low_freq_factor=positive_number(scaling, "low_freq_factor"),
            high_freq_factor=positive_number(scaling, "high_freq_factor"),
        )


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair. float32 [head_dim / 2]."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain)
    return plain


class Rope:
    """Rotates queries and keys of one model, on one device."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope).to(device)
        self._attention_factor = rope.attention_factor

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine for `rotate`, computed in float32.

        `positions`: int64 [T]. Returns two [T, 1, head_dim] of `dtype`. The first half of the
        sine is negated, which saves `rotate` a negation in every layer.
        """
        cos, sin = self.cos_sin(positions)
        return (
            torch.cat((cos, cos), dim=-1)[:, None].to(dtype),
            torch.cat((-sin, sin), dim=-1)[:, None].to(dtype),
        )

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each rotated pair, float32 [T, head_dim / 2] both."""
        radians = positions[:, None].float() * self._inverse_frequencies
        return radians.cos() * self._attention_factor, radians.sin() * self._attention_factor


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates [T, heads, head_dim] by the angles of `Rope.angles`."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(signed_sin))


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones left, those between blended."""
    wavelengths = 2 * math.pi / plain
    rotations = rope.original_max_positions / wavelengths
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    is_long = wavelengths > rope.original_max_positions / rope.low_freq_factor
    is_short = wavelengths < rope.original_max_positions / rope.high_freq_factor
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, blended))


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Between the dimensions of `beta_fast` and `beta_slow` turns, a ramp from plain to slowed."""
    low = _dimension_of(rope, rope.beta_fast)
    high = _dimension_of(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _dimension_of(rope: RopeConfig, num_rotations: float) -> float:
    """The pair that turns `num_rotations` times within the original context."""
    turns = rope.original_max_positions / (num_rotations * 2 * math.pi)
    return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))


def _read_yarn(
    plain: RopeConfig, scaling: Mapping[str, Any], original: int, max_positions: int
) -> RopeConfig:
    factor = positive_number(scaling, "factor", max_positions / original)
    attention_factor = _mscale(factor, 1.0)
    if scaling.get("attention_factor") is not None:
        attention_factor = positive_number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        numerator, denominator = (
            positive_number(scaling, name) for name in ("mscale", "mscale_all_dim")
        )
        attention_factor = _mscale(factor, numerator) / _mscale(factor, denominator)
    return replace(
        plain,
        factor=factor,
        original_max_positions=original,
        beta_fast=positive_number(scaling, "beta_fast", 32),
        beta_slow=positive_number(scaling, "beta_slow", 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=attention_factor,
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def positive_number(keys: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """`keys[name]` of config.json; `default` where it is absent, null or 0. Raises StartupError."""
    value: Any = keys.get(name) or default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 < value <= _MAX_FLOAT32:
        return float(value)
    raise StartupError(f"config.json: {name} must be a positive number, is {keys.get(name)!r:.40}")
