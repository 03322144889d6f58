"""How quantized checkpoints write a matrix, and what it becomes here.

AWQ: Lin et al. (arXiv 2306.00978), as AutoAWQ's "gemm" files hold it. GPTQ: Frantar et al.
(arXiv 2210.17323), as AutoGPTQ and GPTQModel write it. Eight bits with scales: as vLLM,
transformers and compressed-tensors do; packed integers: as compressed-tensors does. Activations
are not quantized, whatever a checkpoint says of them: their scales are left alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from core.errors import StartupError
from engine.quantization.unpack import centered, codes_of, integers_of
from engine.quantization.weight import Code, QuantizedWeight, pack_int4

Tensors = Mapping[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The i-th four bits of a word belong to this one of its eight outputs."""


class CheckpointFormat(ABC):
    """Reads matrices of one kind of checkpoint. Names are those within a module: `q_proj.scales`
    is "scales" of "q_proj"."""

    ignored: Set[str] = frozenset()
    """Tensors that say nothing about weights."""

    @abstractmethod
    def needed(self, present: Set[str]) -> Set[str] | None:
        """Names that make the quantized matrix of a module which has tensors of the names
        `present`; None where it is not quantized."""

    @abstractmethod
    def read(self, tensors: Tensors, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        """The matrix of a module's `needed` tensors. Raises StartupError without its name."""


@dataclass(frozen=True)
class AwqFormat(CheckpointFormat):
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""

    group_size: int
    """-1: one group."""

    def needed(self, present: Set[str]) -> Set[str] | None:
        return {"qweight", "qzeros", "scales"} if "qweight" in present else None

    def read(self, tensors: Tensors, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        group_size = _resolved(self.group_size, num_inputs)
        num_groups = -(-num_inputs // group_size)
        _check_fills_words(num_outputs, 4)
        _check(tensors, "qweight", num_inputs, num_outputs // 8)
        _check(tensors, "qzeros", num_groups, num_outputs // 8)
        _check(tensors, "scales", num_groups, num_outputs)
        return QuantizedWeight(
            Code.INT4,
            pack_int4(self._integers(tensors["qweight"])),
            tensors["scales"].T.contiguous(),
            _unless_all_zero(self._integers(tensors["qzeros"])),
            group_size,
        )

    def _integers(self, words: torch.Tensor) -> torch.Tensor:
        """int8 [out, rows] of int32 [rows, out / 8]."""
        integers = integers_of(words, 4)
        place = torch.tensor(_AWQ_ORDER).argsort()
        return centered(integers.view(len(words), -1, 8)[:, :, place].flatten(1).T, 4)


@dataclass(frozen=True)
class GptqFormat(CheckpointFormat):
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].

    With g_idx [in], the group of each input, groups need not be neighbours (`desc_act`).
    """

    num_bits: int
    group_size: int
    """-1: one group."""
    zeros_are_less_one: bool
    """Zero points are written less 1 (version 1 of the format), or as they are (version 2)."""

    def needed(self, present: Set[str]) -> Set[str] | None:
        if "qweight" not in present:
            return None
        # Older files have a bias of zeros in every module.
        return {"qweight", "qzeros", "scales"} | (present & {"g_idx", "bias"})

    def read(self, tensors: Tensors, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        group_size = _resolved(self.group_size, num_inputs)
        num_groups = -(-num_inputs // group_size)
        _check_fills_words(num_inputs, self.num_bits)
        _check_fills_words(num_outputs, self.num_bits)
        _check(tensors, "qweight", num_inputs * self.num_bits // 32, num_outputs)
        _check(tensors, "qzeros", num_groups, num_outputs * self.num_bits // 32)
        _check(tensors, "scales", num_groups, num_outputs)
        if "bias" in tensors and tensors["bias"].any():
            raise StartupError("bias is not zero, and config.json gives it no place")
        order = _sorted_inputs("g_idx", tensors, group_size, num_inputs)
        zeros = integers_of(tensors["qzeros"], self.num_bits).T + int(self.zeros_are_less_one)
        return QuantizedWeight(
            _integer_code(self.num_bits),
            codes_of(tensors["qweight"].T, self.num_bits, order),
            tensors["scales"].T.contiguous(),
            _unless_all_zero(centered(zeros, self.num_bits)),
            group_size,
            order,
        )


@dataclass(frozen=True)
class PackedFormat(CheckpointFormat):
    """weight_packed [out, in * bits / 32], weight_scale [out, groups], and weight_shape (out, in).

    Zero points, where there are some: weight_zero_point [out * bits / 32, groups]. All integers
    have the middle of their range added. With weight_g_idx [in], as GPTQ's g_idx.
    """

    num_bits: int
    group_size: int
    """-1: one group."""
    has_zeros: bool = False

    def needed(self, present: Set[str]) -> Set[str] | None:
        if "weight_packed" not in present:
            return None
        zeros = {"weight_zero_point"} if self.has_zeros else set()
        always = {"weight_packed", "weight_scale", "weight_shape"}
        return always | zeros | (present & {"weight_g_idx"})

    def read(self, tensors: Tensors, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        group_size = _resolved(self.group_size, num_inputs)
        num_groups = -(-num_inputs // group_size)
        shape = tensors["weight_shape"].tolist()
        if shape != [num_outputs, num_inputs]:
            raise StartupError(
                f"weight_shape is {shape}, config.json asks for {[num_outputs, num_inputs]}"
            )
        _check_fills_words(num_inputs, self.num_bits)
        _check(tensors, "weight_packed", num_outputs, num_inputs * self.num_bits // 32)
        _check(tensors, "weight_scale", num_outputs, num_groups)
        order = _sorted_inputs("weight_g_idx", tensors, group_size, num_inputs)
        zeros = None
        if self.has_zeros:
            _check_fills_words(num_outputs, self.num_bits)
            _check(tensors, "weight_zero_point", num_outputs * self.num_bits // 32, num_groups)
            words = tensors["weight_zero_point"].T
            zeros = _unless_all_zero(centered(integers_of(words, self.num_bits).T, self.num_bits))
        return QuantizedWeight(
            _integer_code(self.num_bits),
            codes_of(tensors["weight_packed"], self.num_bits, order),
            tensors["weight_scale"].contiguous(),
            zeros,
            group_size,
            order,
        )


@dataclass(frozen=True)
class ScaledFormat(CheckpointFormat):
    """weight [out, in] in fp8 or int8, and weight_scale, or weight_scale_inv, which means the same.

    A scale holds for the whole matrix, for an output [out, 1], or for a block.
    """

    block: tuple[int, int] | None = None
    """(outputs, inputs) of a block."""
    ignored = frozenset({"input_scale", "input_zero_point", "activation_scale"})

    def needed(self, present: Set[str]) -> Set[str] | None:
        scales = present & {"weight_scale", "weight_scale_inv"}
        return {"weight"} | scales if scales else None

    def read(self, tensors: Tensors, num_outputs: int, num_inputs: int) -> QuantizedWeight:
        _check(tensors, "weight", num_outputs, num_inputs)
        weight = tensors["weight"]
        if weight.dtype == torch.int8:
            code = Code.INT8
        elif weight.dtype == torch.float8_e4m3fn:
            code = Code.FP8
            if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
                raise StartupError("weight has values that are not numbers")
        else:
            raise StartupError(f"weight has dtype {weight.dtype}, not float8_e4m3fn or int8")
        name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
        scales, group_size = self._scales(name, tensors[name].float(), num_outputs, num_inputs)
        return QuantizedWeight(code, weight, scales, None, group_size)

    def _scales(
        self, name: str, scale: torch.Tensor, num_outputs: int, num_inputs: int
    ) -> tuple[torch.Tensor, int]:
        """Scales [out, groups] and the size of a group."""
        if scale.numel() == 1:
            return scale.reshape(1, 1).repeat(num_outputs, 1), num_inputs
        rows, columns = self.block or (1, num_inputs)
        shape = (-(-num_outputs // rows), -(-num_inputs // columns))
        if scale.numel() != shape[0] * shape[1]:
            raise StartupError(
                f"{name} has shape {list(scale.shape)}, config.json asks for {list(shape)}"
            )
        spread = scale.reshape(shape).repeat_interleave(rows, dim=0)[:num_outputs]
        return spread.contiguous(), columns


def _resolved(group_size: int, num_inputs: int) -> int:
    return num_inputs if group_size == -1 else group_size


def _check(tensors: Tensors, name: str, *shape: int) -> None:
    found = list(tensors[name].shape)
    if found != list(shape):
        raise StartupError(f"{name} has shape {found}, config.json asks for {list(shape)}")


def _check_fills_words(num_integers: int, num_bits: int) -> None:
    if num_integers * num_bits % 32:
        raise StartupError(f"{num_integers} integers of {num_bits} bits do not fill words of 32")


def _integer_code(num_bits: int) -> Code:
    return Code.INT4 if num_bits == 4 else Code.INT8


def _sorted_inputs(
    name: str, tensors: Tensors, group_size: int, num_inputs: int
) -> torch.Tensor | None:
    """Inputs sorted by their groups, which the tensor `name` [in] tells; None where they are."""
    if name not in tensors:
        return None
    _check(tensors, name, num_inputs)
    groups, in_order = tensors[name].long(), torch.arange(num_inputs) // group_size
    if torch.equal(groups, in_order):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], in_order):
        raise StartupError(f"{name} has groups that are not of {group_size} inputs")
    return order


def _unless_all_zero(zeros: torch.Tensor) -> torch.Tensor | None:
    return zeros.contiguous() if bool(zeros.any()) else None
