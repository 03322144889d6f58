"""A matrix whose outputs come from several modules of a checkpoint, while its tensors arrive."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial

import torch

from core.errors import StartupError
from engine.linear import Linear
from engine.matrices import MatrixStorage, Part
from engine.quantization.formats import CheckpointFormat
from engine.quantization.weight import QuantizedWeight

Fill = Callable[[torch.Tensor], None]
"""Takes one tensor of a file. Raises StartupError naming it."""


@dataclass(frozen=True)
class Placing:
    """What tensors become when they are loaded."""

    device: torch.device
    storage: MatrixStorage

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.storage.dtype, device=self.device)


@dataclass
class _Module:
    """The outputs that one module holds: `num_rows`, from the first-th on."""

    name: str
    first: int
    num_rows: int
    gathered: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of its quantized matrix."""
    weight: QuantizedWeight | None = None
    """None where the matrix is floating."""

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.first : self.first + self.num_rows]


class FusedMatrix:
    """Fills `linear`, and hands it to the storage as soon as its last tensor is there.

    Nothing is allocated before the first one comes, so that a model which is quantized as it
    loads never takes its unquantized size.
    """

    def __init__(
        self, num_outputs: int, num_inputs: int, placing: Placing, is_of_layer: bool
    ) -> None:
        self.linear = Linear()
        self._shape = (num_outputs, num_inputs)
        self._placing = placing
        self._is_of_layer = is_of_layer
        self._modules: list[_Module] = []
        self._num_missing = 0

    def add_bias(self) -> None:
        """Every module has a bias; call it before they are added."""
        self.linear.bias = self._placing.empty(self._shape[0])

    def add_part(
        self, name: str, num_rows: int, present: Set[str], format_: CheckpointFormat | None
    ) -> dict[str, Fill]:
        """The next `num_rows` outputs are those of the module `name`, which has tensors of the
        names `present` (less its own); says where each that it must have goes."""
        first = sum(module.num_rows for module in self._modules)
        module = _Module(name, first, num_rows)
        needed = None if format_ is None else format_.needed(present)
        fills: dict[str, Fill] = {}
        if self.linear.bias is not None:
            fills["bias"] = partial(self._fill_bias, module)
        if format_ is None or needed is None:
            fills["weight"] = partial(self._fill_weight, module)
        else:
            needed = needed - fills.keys()
            fills |= {own: partial(self._gather, module, format_, needed, own) for own in needed}
        self._modules.append(module)
        self._num_missing += len(fills)
        return {f"{name}.{own}": fill for own, fill in fills.items()}

    def _fill_weight(self, module: _Module, source: torch.Tensor) -> None:
        if self.linear.weight is None:
            self.linear.weight = self._placing.empty(*self._shape)
        fill_tensor(f"{module.name}.weight", module.rows_of(self.linear.weight), source)
        self._count()

    def _fill_bias(self, module: _Module, source: torch.Tensor) -> None:
        assert self.linear.bias is not None
        fill_tensor(f"{module.name}.bias", module.rows_of(self.linear.bias), source)
        self._count()

    def _gather(
        self,
        module: _Module,
        format_: CheckpointFormat,
        needed: Set[str],
        own_name: str,
        source: torch.Tensor,
    ) -> None:
        module.gathered[own_name] = source
        if module.gathered.keys() == needed:
            try:
                weight = format_.read(module.gathered, module.num_rows, self._shape[1])
            except StartupError as error:
                raise StartupError(f"quantized module {module.name}: {error.message}") from None
            module.weight = weight.to(self._placing.device)
            module.gathered = {}
        self._count()

    def _count(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._finish()

    def _finish(self) -> None:
        storage, matrix = self._placing.storage, self.linear
        if any(module.weight is not None for module in self._modules):
            storage.keep_parts(matrix, [self._part(module) for module in self._modules])
        elif self._is_of_layer:
            storage.quantize(matrix)
        else:
            storage.keep(matrix)

    def _part(self, module: _Module) -> Part:
        weight, bias = self.linear.weight, self.linear.bias
        content: torch.Tensor | QuantizedWeight | None = module.weight
        if content is None:
            assert weight is not None
            content = module.rows_of(weight)
        return Part(content, None if bias is None else module.rows_of(bias))


def fill_tensor(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the tensor `name` of a file to its place. Raises StartupError."""
    if source.shape != target.shape:
        raise StartupError(
            f"tensor {name} has shape {list(source.shape)}, "
            f"config.json asks for {list(target.shape)}"
        )
    if not source.is_floating_point() or source.itemsize == 1:
        raise StartupError(f"tensor {name} has dtype {source.dtype}, not a floating one")
    target.copy_(source)
