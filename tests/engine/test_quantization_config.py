"""`quantization_config`: what is read of it, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import StartupError
from engine.quantization.config import checkpoint_format
from engine.quantization.formats import AwqFormat, GptqFormat, PackedFormat, ScaledFormat

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "ignore": ["lm_head"],
        **fields,
    }


def pack_quantized(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    return compressed(scheme | weights, format="pack-quantized")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, None),
        (AWQ | {"zero_point": True, "modules_to_not_convert": ["visual"]}, AwqFormat(128)),
        (GPTQ | {"desc_act": True, "sym": True}, GptqFormat(4, -1, zeros_are_less_one=True)),
        (
            GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "dynamic": None},
            GptqFormat(8, -1, zeros_are_less_one=False),
        ),
        (FP8 | {"ignored_layers": ["lm_head"]}, ScaledFormat()),
        (FP8 | {"fmt": "e4m3", "weight_block_size": [128, 64]}, ScaledFormat((128, 64))),
        (compressed({"symmetric": True, "dynamic": False}), ScaledFormat()),
        (compressed({"strategy": "group", "group_size": 64}), ScaledFormat((1, 64))),
        (
            compressed({"strategy": "block", "block_structure": [128, 128]}),
            ScaledFormat((128, 128)),
        ),
        (pack_quantized(symmetric=True, actorder="weight"), PackedFormat(4, 128)),
        (pack_quantized(symmetric=False, actorder="group"), PackedFormat(4, 128, has_zeros=True)),
        (pack_quantized(num_bits=8, strategy="channel", group_size=None), PackedFormat(8, -1)),
    ],
)
def test_supported_configs_are_read(raw: dict[str, Any] | None, expected: object) -> None:
    assert checkpoint_format(raw) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (["awq"], "quantization_config is not an object"),
        (
            {"quant_method": "bitsandbytes"},
            r"\(bitsandbytes\) are not supported; supported: awq, gptq, fp8, compressed-tensors",
        ),
        ({}, r"\(unnamed\) are not supported"),
        ({"quant_method": ["awq"]}, r"\(\['awq'\]\) are not supported"),
        (AWQ | {"version": "gemv"}, r"\(awq\): version 'gemv' .*supported: gemm"),
        (AWQ | {"zero_point": False}, r"\(awq\): zero_point False .*supported: True"),
        (AWQ | {"group_size": 0}, r"\(awq\): group_size 0 .*supported: -1 and positive"),
        (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 .*supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin' .*gptq, gptq_v2"),
        (GPTQ | {"dynamic": {"-:mlp": {}}}, "dynamic .* is not supported; supported: none"),
        (GPTQ | {"rotation": "hadamard"}, r"\(gptq\): rotation is not known to this engine"),
        (FP8 | {"fmt": "e5m2"}, r"\(fp8\): fmt 'e5m2' .*supported: e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\] .*two positive"),
        (
            compressed({}, format="marlin-24"),
            "format 'marlin-24' .*float-quantized.*pack-quantized",
        ),
        (pack_quantized(num_bits=3), "num_bits 3 .*supported: 4, 8"),
        (pack_quantized(type="float"), "type 'float' .*supported: int"),
        (pack_quantized(strategy="tensor"), "strategy 'tensor' .*supported: group, channel"),
        (pack_quantized(group_size=None), "group_size None .*supported: -1 and positive"),
        (pack_quantized(actorder="random"), "actorder 'random' .*supported: group"),
        (compressed({"num_bits": 4}), "num_bits 4 .*supported: 8"),
        (compressed({"symmetric": False}), "symmetric False .*supported: True"),
        (compressed({}, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme .*supported: none"),
        (compressed({}, config_groups={}), "config_groups {} .*objects with weights"),
    ],
)
def test_what_is_not_supported_is_named_with_what_is(raw: Any, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        checkpoint_format(raw)
