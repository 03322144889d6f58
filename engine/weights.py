"""Loads a Hugging Face folder's safetensors straight into the decoder's fused tensors.

Files are mapped, not read: each tensor is copied once, from the page cache to its place
(converted to the wanted dtype on the way). A matrix that is to be packed or quantized is so as
soon as its last part is there, so that no second copy of the model ever exists.
Every tensor must be there, of the right shape, and nothing else may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import StartupError
from core.model_folder import weight_files
from engine.decoder import DecoderWeights, LayerWeights
from engine.fused_matrix import Fill, FusedMatrix, Placing, fill_tensor
from engine.linear import Linear
from engine.matrices import MatrixStorage
from engine.model_config import ModelConfig

_NOT_WEIGHTS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Buffers that older versions of transformers saved."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    storage: MatrixStorage,
    device: torch.device,
    progress: Callable[[str], None],
) -> DecoderWeights:
    """Allocates and fills all tensors, of the storage's dtype; matrices end as it keeps them.

    Raises StartupError naming the tensor or the file.
    """
    files = weight_files(folder)
    names = frozenset().union(*(_names_in(path) for path in files))
    plan = _Plan(config, names, Placing(device, storage))
    for number, path in enumerate(files, start=1):
        progress(f"loading weights {number}/{len(files)}: {path.name}")
        _load_file(path, plan)
    missing = sorted(plan.pending)
    if missing:
        raise StartupError(
            f"weights in {folder}: {len(missing)} tensors are missing, first {missing[0]}"
        )
    plan.finish()
    return plan.weights


class _Plan:
    """Where each tensor of the files, whose `names` these are, goes."""

    def __init__(self, config: ModelConfig, names: Set[str], placing: Placing) -> None:
        self.pending: dict[str, Fill] = {}
        self._names = names
        self._format = config.checkpoint_format
        self._placing = placing
        self._filled: set[str] = set()
        self._ignored = {"lm_head.weight"} if config.has_tied_embeddings else set()
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.has_tied_embeddings:
            lm_head = Linear(embedding, is_shared=True)
        else:
            lm_head = self._linear(
                {"lm_head": config.vocab_size}, config.hidden_size, False, is_of_layer=False
            )
        self.weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(config, index) for index in range(config.num_layers)),
            final_norm=self._tensor("model.norm.weight", config.hidden_size),
            lm_head=lm_head,
        )

    def fill(self, name: str, source: torch.Tensor) -> None:
        """Takes one tensor of a file to its place."""
        if name in self._ignored or name.endswith(_NOT_WEIGHTS):
            return
        if name in self._filled:
            raise StartupError(f"tensor {name} occurs twice")
        fill = self.pending.pop(name, None)
        if fill is None:
            raise StartupError(f"unexpected tensor {name}: config.json gives it no place")
        fill(source)
        self._filled.add(name)

    def finish(self) -> None:
        """What can be done only when nothing is pending."""
        if self.weights.lm_head.is_shared:
            self._placing.storage.keep(self.weights.lm_head)

    def _layer(self, config: ModelConfig, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, inner = config.hidden_size, config.intermediate_size
        q_norm = k_norm = None
        if config.has_qk_norm:
            q_norm = self._tensor(attention + "q_norm.weight", config.head_dim)
            k_norm = self._tensor(attention + "k_norm.weight", config.head_dim)
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(
                {
                    attention + "q_proj": config.q_size,
                    attention + "k_proj": config.kv_size,
                    attention + "v_proj": config.kv_size,
                },
                hidden,
                config.has_qkv_bias,
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._linear({attention + "o_proj": hidden}, config.q_size, config.has_o_bias),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                {mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.has_mlp_bias
            ),
            down=self._linear({mlp + "down_proj": hidden}, inner, config.has_mlp_bias),
        )

    def _linear(
        self,
        parts: dict[str, int],
        num_inputs: int,
        has_bias: bool,
        *,
        is_of_layer: bool = True,
    ) -> Linear:
        """One matrix of the rows of all `parts` (module name -> rows), in order."""
        matrix = FusedMatrix(sum(parts.values()), num_inputs, self._placing, is_of_layer)
        if has_bias:
            matrix.add_bias()
        for module, size in parts.items():
            prefix = module + "."
            present = {name.removeprefix(prefix) for name in self._names if name.startswith(prefix)}
            self.pending |= matrix.add_part(module, size, present, self._format)
            if self._format is not None:
                self._ignored |= {prefix + own for own in self._format.ignored}
        return matrix.linear

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._placing.empty(*shape)
        self.pending[name] = partial(fill_tensor, name, tensor)
        return tensor


def _names_in(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _load_file(path: Path, plan: _Plan) -> None:
    try:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                plan.fill(name, file.get_tensor(name))
    except StartupError as error:
        raise StartupError(f"{path}: {error.message}") from None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The safetensors file `path`, mapped. Raises StartupError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read weights {path}: {error}") from error
