"""Loads a Hugging Face folder's safetensors straight into the decoder's fused tensors.

Files are mapped, not read: each tensor is copied once, from the page cache to its place
(converted to the wanted dtype on the way). A matrix that is to be packed is packed as soon as
its last part is there, so that no second copy of the model ever exists.
Every tensor must be there, of the right shape, and nothing else may be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core.errors import StartupError
from core.model_folder import weight_files
from engine.decoder import DecoderWeights, LayerWeights
from engine.linear import Linear
from engine.model_config import ModelConfig

_NOT_WEIGHTS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")
"""Buffers that older versions of transformers saved."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
    pack: Callable[[Linear], None] | None = None,
) -> DecoderWeights:
    """Allocates and fills all tensors, and calls `pack` with each matrix that it may replace.

    Raises StartupError naming the tensor or the file.
    """
    files = weight_files(folder)
    plan = _Plan(config, dtype, device, pack)
    for number, path in enumerate(files, start=1):
        progress(f"loading weights {number}/{len(files)}: {path.name}")
        _load_file(path, plan)
    missing = sorted(plan.pending)
    if missing:
        raise StartupError(
            f"weights in {folder}: {len(missing)} tensors are missing, first {missing[0]}"
        )
    return plan.weights


class _Plan:
    """Where each named tensor goes: views into the tensors of `weights`, not yet filled."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        pack: Callable[[Linear], None] | None,
    ) -> None:
        self.pending: dict[str, torch.Tensor] = {}
        self._matrices: dict[str, Linear] = {}
        self._num_missing: dict[Linear, int] = {}
        self._pack = pack
        self._filled: set[str] = set()
        self._dtype = dtype
        self._device = device
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._ignored = {"lm_head.weight"} if config.has_tied_embeddings else set()
        if config.has_tied_embeddings:
            lm_head = Linear(embedding, is_shared=True)
            self._matrices["model.embed_tokens.weight"] = lm_head
            self._num_missing[lm_head] = 1
        else:
            lm_head = self._linear({"lm_head": config.vocab_size}, config.hidden_size, False)
        self.weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(config, index) for index in range(config.num_layers)),
            final_norm=self._tensor("model.norm.weight", config.hidden_size),
            lm_head=lm_head,
        )

    def fill(self, name: str, source: torch.Tensor) -> None:
        """Copies one tensor of a file to its place."""
        if name in self._ignored or name.endswith(_NOT_WEIGHTS):
            return
        if name in self._filled:
            raise StartupError(f"tensor {name} occurs twice")
        target = self.pending.pop(name, None)
        if target is None:
            raise StartupError(f"unexpected tensor {name}: config.json gives it no place")
        if source.shape != target.shape:
            raise StartupError(
                f"tensor {name} has shape {list(source.shape)}, "
                f"config.json asks for {list(target.shape)}"
            )
        if not source.is_floating_point():
            raise StartupError(f"tensor {name} has dtype {source.dtype}, not a floating one")
        target.copy_(source)
        self._filled.add(name)
        if (matrix := self._matrices.get(name)) is not None:
            self._num_missing[matrix] -= 1
            if self._num_missing[matrix] == 0 and self._pack is not None:
                self._pack(matrix)

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

    def _linear(self, parts: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        """One matrix of the rows of all `parts` (module name -> rows), in order."""
        num_outputs = sum(parts.values())
        weight = self._empty(num_outputs, num_inputs)
        bias = self._empty(num_outputs) if has_bias else None
        matrix = Linear(weight, bias)
        tensors = [(".weight", weight)] + ([(".bias", bias)] if bias is not None else [])
        first = 0
        for name, size in parts.items():
            for suffix, tensor in tensors:
                self.pending[name + suffix] = tensor[first : first + size]
                self._matrices[name + suffix] = matrix
            first += size
        self._num_missing[matrix] = len(parts) * len(tensors)
        return matrix

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self.pending[name] = tensor
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _load_file(path: Path, plan: _Plan) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                plan.fill(name, file.get_tensor(name))
    except StartupError as error:
        raise StartupError(f"{path}: {error.message}") from None
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read weights {path}: {error}") from error
