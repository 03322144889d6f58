"""Writes quantized checkpoints from plain ones, from what is published of each format.

Weights are rounded to the nearest code, without calibration, so what comes out is less accurate
than what AWQ or GPTQ compute; the files are laid out like theirs. Shares no code with the engine,
and says what each matrix has become, so that the engine's reading can be checked.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Written:
    """One matrix: its tensors in the file, and what they stand for [out, in]."""

    tensors: Mapping[str, torch.Tensor]
    values: Floats


@dataclass(frozen=True)
class Recipe:
    """One kind of checkpoint."""

    config: Mapping[str, Any]
    """`quantization_config`."""
    quantize: Callable[[Floats, int], Written]
    """Of a weight [out, in], with a seed that differs from matrix to matrix."""


def write_quantized(
    source: Path, target: Path, recipe: Recipe, left_alone: tuple[str, ...] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Copies the model folder `source`, of one file, to `target` with all projections quantized.

    Names that end in one of `left_alone` keep their floating weight. Returns all weights, the
    quantized ones as they should be read: float32, by the names that `source` has for them.
    """
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(config | {"quantization_config": dict(recipe.config)})
    )
    plain = load_file(source / "model.safetensors")
    expected, stored = dict(plain), dict(plain)
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module.endswith(left_alone):
            continue
        written = recipe.quantize(tensor.float().numpy(), zlib.crc32(name.encode()))
        del stored[name]
        stored |= {f"{module}.{own}": value for own, value in written.tensors.items()}
        expected[name] = torch.from_numpy(written.values)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return expected


def awq(group_size: int = 128) -> Recipe:
    """Four bits with zero points, in AutoAWQ's "gemm" layout."""

    def quantize(weight: Floats, seed: int) -> Written:
        del seed
        codes, scales, zeros = _to_integers(weight, 4, np.arange(weight.shape[1]) // group_size)
        tensors = {
            "qweight": _pack_columns(codes.T, 4, _AWQ_ORDER),
            "qzeros": _pack_columns(zeros.T, 4, _AWQ_ORDER),
            "scales": _halves(scales.T),
        }
        return Written(tensors, _values(codes, scales, zeros, group_size))

    return Recipe(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        },
        quantize,
    )


@dataclass(frozen=True)
class GptqOptions:
    """Settings of `gptq`."""

    num_bits: int = 4
    group_size: int = 128
    """-1: one group."""
    version: str = "gptq"
    """Or "gptq_v2"."""
    is_symmetric: bool = False
    order: str = "none"
    """Inputs in groups that are not neighbours: "shared" by all matrices of as many inputs, or
    each its "own"."""


def gptq(options: GptqOptions) -> Recipe:
    """Four or eight bits with zero points, as AutoGPTQ (and GPTQModel) write it."""

    def quantize(weight: Floats, seed: int) -> Written:
        num_inputs = weight.shape[1]
        group_size = num_inputs if options.group_size == -1 else options.group_size
        groups = np.arange(num_inputs) // group_size
        if options.order != "none":
            rng = np.random.default_rng(seed if options.order == "own" else num_inputs)
            groups = rng.permutation(groups)
        codes, scales, zeros = _to_integers(weight, options.num_bits, groups, options.is_symmetric)
        stored_zeros = zeros - 1 if options.version == "gptq" else zeros
        tensors = {
            "qweight": _pack_columns(codes, options.num_bits).T.contiguous(),
            "qzeros": _pack_columns(stored_zeros.T, options.num_bits),
            "scales": _halves(scales.T),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        values = (codes - zeros[:, groups]) * scales[:, groups]
        return Written(tensors, values.astype(np.float32))

    return Recipe(
        {
            "quant_method": "gptq",
            "bits": options.num_bits,
            "group_size": options.group_size,
            "desc_act": options.order != "none",
            "sym": options.is_symmetric,
            "checkpoint_format": options.version,
        },
        quantize,
    )


def fp8(block: tuple[int, int] | None = None) -> Recipe:
    """float8_e4m3fn with a scale for the whole matrix (`weight_scale`) or a block of it
    (`weight_scale_inv`)."""

    def quantize(weight: Floats, seed: int) -> Written:
        del seed
        rows, columns = block or weight.shape
        stored, scales = _to_scaled(weight, rows, columns, torch.float8_e4m3fn)
        if block is not None:
            return _scaled(stored, scales, block, {"weight_scale_inv": scales})
        one = {"weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.125)}
        return _scaled(stored, scales, weight.shape, one)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
    if block is not None:
        config |= {"activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Recipe(config, quantize)


def compressed(type_: str = "float") -> Recipe:
    """compressed-tensors in 8 bits, "float" or "int", with a scale for each output."""
    dtype = torch.float8_e4m3fn if type_ == "float" else torch.int8

    def quantize(weight: Floats, seed: int) -> Written:
        del seed
        stored, scales = _to_scaled(weight, 1, weight.shape[1], dtype)
        return _scaled(stored, scales, (1, weight.shape[1]), {"weight_scale": scales})

    weights = {"num_bits": 8, "type": type_, "symmetric": True, "strategy": "channel"}
    return Recipe(
        {
            "quant_method": "compressed-tensors",
            "format": f"{type_}-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
        quantize,
    )


def _to_integers(
    weight: Floats, num_bits: int, groups: Integers, is_symmetric: bool = False
) -> tuple[Integers, Floats, Integers]:
    """Codes [out, in], scales and zeros [out, groups]; weight = (code - zero) * scale."""
    largest = (1 << num_bits) - 1
    num_groups = int(groups.max()) + 1
    scales = np.empty((len(weight), num_groups), np.float32)
    zeros = np.empty((len(weight), num_groups), np.int64)
    for group in range(num_groups):
        members = weight[:, groups == group]
        low, high = np.minimum(members.min(1), 0), np.maximum(members.max(1), 0)
        if is_symmetric:
            high = np.maximum(high, -low)
            low = -high
        # Checkpoints have scales in float16.
        scale = ((high - low) / largest).astype(np.float16).astype(np.float32)
        scales[:, group] = np.maximum(scale, np.float32(2**-14))
        zeros[:, group] = np.round(-low / scales[:, group])
        if is_symmetric:
            zeros[:, group] = (largest + 1) // 2
    # Version 1 of GPTQ's format cannot write a zero point of 0.
    zeros = np.clip(zeros, 1, largest)
    codes = np.round(weight / scales[:, groups]) + zeros[:, groups]
    return np.clip(codes, 0, largest).astype(np.int64), scales, zeros


def _values(codes: Integers, scales: Floats, zeros: Integers, group_size: int) -> Floats:
    groups = np.arange(codes.shape[1]) // group_size
    return ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def _pack_columns(
    integers: Integers, num_bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """int32 [rows, columns * bits / 32]: the i-th bits of a word are those of its order[i]-th
    column."""
    per_word = 32 // num_bits
    packed = np.zeros((len(integers), integers.shape[1] // per_word), np.uint32)
    for place, column in enumerate(order or range(per_word)):
        packed |= integers[:, column::per_word].astype(np.uint32) << np.uint32(place * num_bits)
    return torch.from_numpy(packed.view(np.int32))


def _halves(scales: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(scales)).half()


def _to_scaled(
    weight: Floats, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in `dtype`, and a float32 scale for each block of `rows` and `columns`."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    values = torch.from_numpy(weight)
    stored = torch.empty(values.shape, dtype=dtype)
    scales = torch.empty(-(-len(values) // rows), -(-values.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = values[block].abs().max() / largest
            scaled = values[block] / scales[i, j]
            stored[block] = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return stored, scales


def _scaled(
    stored: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, ...],
    tensors: Mapping[str, torch.Tensor],
) -> Written:
    num_outputs, num_inputs = stored.shape
    spread = np.kron(scales.numpy(), np.ones(block, np.float32))[:num_outputs, :num_inputs]
    return Written({"weight": stored, **tensors}, stored.float().numpy() * spread)
