"""`quantization_config` of config.json: which format a checkpoint's matrices have.

What is not understood is refused by name. Which modules are quantized is seen from the tensors
that they have, so lists of modules that are not (`modules_to_not_convert`, `ignored_layers`,
`ignore`) need not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from core.errors import StartupError
from engine.quantization.formats import (
    AwqFormat,
    CheckpointFormat,
    GptqFormat,
    PackedFormat,
    ScaledFormat,
)
from engine.quantization.known_fields import (
    OF_ALL,
    OF_AWQ,
    OF_COMPRESSED,
    OF_COMPRESSED_WEIGHTS,
    OF_FP8,
    OF_GPTQ,
)

RawConfig = Mapping[str, Any]


def checkpoint_format(raw: RawConfig | None) -> CheckpointFormat | None:
    """The format that `quantization_config` describes; None where there is none.

    Raises StartupError naming the method, and the field that is not supported.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise StartupError("config.json: quantization_config is not an object")
    method = raw.get("quant_method", "unnamed")
    if not isinstance(method, str) or method not in _METHODS:
        raise StartupError(
            f"quantized weights ({method}) are not supported; supported: {', '.join(_METHODS)}"
        )
    return _METHODS[method](_Fields(method, raw))


class _Fields:
    """The fields of one object, each of which is read, known not to matter, or refused."""

    def __init__(self, method: str, raw: RawConfig) -> None:
        self._method = method
        self._raw = raw
        self._read: set[str] = set()

    def one_of(self, name: str, supported: tuple[Any, ...], default: Any) -> Any:
        """The field's value; absent or null is `default`. A string's case does not matter."""
        self._read.add(name)
        value = self._raw.get(name)
        if value is None:
            value = default
        if isinstance(value, str):
            value = value.lower()
        if value not in supported or isinstance(value, bool) != isinstance(supported[0], bool):
            raise self.error(name, value, ", ".join(str(choice) for choice in supported))
        # 4.0 is equal to 4, and no number of bits to count with.
        return supported[supported.index(value)]

    def empty(self, *names: str) -> None:
        """These change what weights mean, in ways that are not supported."""
        for name in names:
            self._read.add(name)
            if self._raw.get(name):
                raise self.error(name, self._raw[name], "none")

    def group_size(self) -> int:
        self._read.add("group_size")
        value = self._raw.get("group_size", self._raw.get("q_group_size"))
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if not is_size or value == 0 or value < -1:
            raise self.error("group_size", value, "-1 and positive integers")
        return int(value)

    def pair(self, name: str) -> tuple[int, int] | None:
        """Two positive integers, or None where they are absent or null."""
        self._read.add(name)
        value = self._raw.get(name)
        if value is None:
            return None
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(size, int) and size > 0 for size in value):
            raise self.error(name, value, "two positive integers")
        return int(value[0]), int(value[1])

    def objects(self, name: str, inner: str) -> list[_Fields]:
        """The object `inner` in each of the objects in the field `name`."""
        self._read.add(name)
        outer = self._raw.get(name)
        found = list(outer.values()) if isinstance(outer, Mapping) else []
        if not found or not all(
            isinstance(item, Mapping) and isinstance(item.get(inner), Mapping) for item in found
        ):
            raise self.error(name, outer, f"objects with {inner}")
        return [_Fields(self._method, item[inner]) for item in found]

    def done(self, without_effect: Set[str]) -> None:
        """Refuses what has neither been read nor is named here."""
        for name in sorted(self._raw.keys() - self._read - without_effect):
            raise StartupError(
                f"quantized weights ({self._method}): {name} is not known to this engine"
            )

    def error(self, name: str, value: object, supported: str) -> StartupError:
        return StartupError(
            f"quantized weights ({self._method}): {name} {value!r} is not supported; "
            f"supported: {supported}"
        )


def _awq(fields: _Fields) -> CheckpointFormat:
    fields.one_of("bits", (4,), 4)
    fields.one_of("w_bit", (4,), 4)
    fields.one_of("version", ("gemm",), "gemm")
    fields.one_of("format", ("gemm",), "gemm")
    fields.one_of("zero_point", (True,), True)
    fields.empty("dynamic")
    found = AwqFormat(fields.group_size())
    fields.done(OF_ALL | OF_AWQ | {"q_group_size"})
    return found


def _gptq(fields: _Fields) -> CheckpointFormat:
    versions = ("gptq", "gptq_v2")
    version = fields.one_of("checkpoint_format", versions, "gptq")
    version = fields.one_of("format", versions, version)
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.empty("dynamic", "is_marlin_format")
    found = GptqFormat(
        num_bits=fields.one_of("bits", (4, 8), None),
        group_size=fields.group_size(),
        zeros_are_less_one=version == "gptq",
    )
    fields.done(OF_ALL | OF_GPTQ)
    return found


def _fp8(fields: _Fields) -> CheckpointFormat:
    fields.one_of("fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"), "e4m3")
    fields.empty("kv_cache_scheme")
    found = ScaledFormat(fields.pair("weight_block_size"))
    fields.done(OF_ALL | OF_FP8)
    return found


def _compressed(fields: _Fields) -> CheckpointFormat:
    scaled = ("float-quantized", "int-quantized", "naive-quantized")
    is_packed = fields.one_of("format", (*scaled, "pack-quantized"), None) == "pack-quantized"
    fields.empty("kv_cache_scheme", "sparsity_config", "transform_config")
    read = _packed if is_packed else _scaled
    found = {read(weights) for weights in fields.objects("config_groups", "weights")}
    if len(found) != 1:
        raise fields.error("config_groups", f"of {len(found)} schemes", "one for all weights")
    fields.done(OF_ALL | OF_COMPRESSED)
    return found.pop()


def _packed(weights: _Fields) -> CheckpointFormat:
    weights.one_of("type", ("int",), None)
    weights.one_of("dynamic", (False,), False)
    # Which input is in which group, a tensor tells.
    weights.one_of("actorder", ("group", "dynamic", "weight", "static"), "static")
    strategy = weights.one_of("strategy", ("group", "channel"), None)
    found = PackedFormat(
        num_bits=weights.one_of("num_bits", (4, 8), None),
        group_size=weights.group_size() if strategy == "group" else -1,
        has_zeros=not weights.one_of("symmetric", (True, False), True),
    )
    weights.done(OF_COMPRESSED_WEIGHTS)
    return found


def _scaled(weights: _Fields) -> CheckpointFormat:
    weights.one_of("num_bits", (8,), None)
    weights.one_of("type", ("float", "int"), None)
    weights.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    weights.empty("actorder")
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), None)
    block = None
    if strategy == "group":
        block = (1, weights.group_size())
    if strategy == "block":
        block = weights.pair("block_structure")
    weights.done(OF_COMPRESSED_WEIGHTS)
    return ScaledFormat(block)


_METHODS: Mapping[str, Callable[[_Fields], CheckpointFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}
