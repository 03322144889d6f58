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
import torch
from safetensors.torch import load_file, save_file

from bench.quantized_rounding import (
    Floats,
    halves,
    pack_columns,
    to_integers,
    to_scaled,
    values,
)

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
        groups = np.arange(weight.shape[1]) // group_size
        codes, scales, zeros = to_integers(weight, 4, groups)
        tensors = {
            "qweight": pack_columns(codes.T, 4, _AWQ_ORDER),
            "qzeros": pack_columns(zeros.T, 4, _AWQ_ORDER),
            "scales": halves(scales.T),
        }
        return Written(tensors, values(codes, scales, zeros, groups))

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
        codes, scales, zeros = to_integers(weight, options.num_bits, groups, options.is_symmetric)
        stored_zeros = zeros - 1 if options.version == "gptq" else zeros
        tensors = {
            "qweight": pack_columns(codes, options.num_bits).T.contiguous(),
            "qzeros": pack_columns(stored_zeros.T, options.num_bits),
            "scales": halves(scales.T),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return Written(tensors, values(codes, scales, zeros, groups))

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
        stored, scales = to_scaled(weight, rows, columns, torch.float8_e4m3fn)
        if block is not None:
            return _scaled(stored, scales, block, {"weight_scale_inv": scales})
        one = {"weight_scale": scales.reshape(()), "input_scale": torch.tensor(0.125)}
        return _scaled(stored, scales, weight.shape, one)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}
    if block is not None:
        config |= {"activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Recipe(config, quantize)


def packed(
    num_bits: int = 4, group_size: int = 128, is_symmetric: bool = True, has_order: bool = False
) -> Recipe:
    """compressed-tensors in 4 or 8 bits, packed in words; groups may be of scattered inputs."""

    def quantize(weight: Floats, seed: int) -> Written:
        groups = np.arange(weight.shape[1]) // group_size
        if has_order:
            groups = np.random.default_rng(seed).permutation(groups)
        codes, scales, zeros = to_integers(weight, num_bits, groups, is_symmetric)
        tensors = {
            "weight_packed": pack_columns(codes, num_bits),
            "weight_scale": halves(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = pack_columns(zeros.T, num_bits).T.contiguous()
        if has_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Written(tensors, values(codes, scales, zeros, groups))

    weights = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group",
        "group_size": group_size,
        "actorder": "group" if has_order else None,
    }
    return _compressed_tensors("pack-quantized", weights, quantize)


def compressed(type_: str = "float") -> Recipe:
    """compressed-tensors in 8 bits, "float" or "int", with a scale for each output."""
    dtype = torch.float8_e4m3fn if type_ == "float" else torch.int8

    def quantize(weight: Floats, seed: int) -> Written:
        del seed
        stored, scales = to_scaled(weight, 1, weight.shape[1], dtype)
        return _scaled(stored, scales, (1, weight.shape[1]), {"weight_scale": scales})

    weights = {"num_bits": 8, "type": type_, "symmetric": True, "strategy": "channel"}
    return _compressed_tensors(f"{type_}-quantized", weights, quantize)


def _compressed_tensors(
    format_: str, weights: Mapping[str, Any], quantize: Callable[[Floats, int], Written]
) -> Recipe:
    return Recipe(
        {
            "quant_method": "compressed-tensors",
            "format": format_,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": dict(weights)}},
            "ignore": ["lm_head"],
        },
        quantize,
    )


def _scaled(
    stored: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, ...],
    tensors: Mapping[str, torch.Tensor],
) -> Written:
    num_outputs, num_inputs = stored.shape
    spread = np.kron(scales.numpy(), np.ones(block, np.float32))[:num_outputs, :num_inputs]
    return Written({"weight": stored, **tensors}, stored.float().numpy() * spread)
