"""Weights from single and sharded safetensors, and what is wrong with broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import StartupError
from engine.decoder import DecoderWeights
from engine.matrices import MatrixStorage
from engine.model_config import ModelConfig
from engine.weights import load_weights
from tests import tiny_models

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    config = ModelConfig.from_folder(folder)
    storage = MatrixStorage(dtype)
    return load_weights(folder, config, storage, torch.device("cpu"), progress=lambda _: None)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces (or with None drops) tensors of the folder's single file."""
    tensors = load_file(folder / "model.safetensors")
    tensors.update({name: tensor for name, tensor in changes.items() if tensor is not None})
    kept = {name: tensors[name] for name in tensors if changes.get(name, 0) is not None}
    save_file(kept, folder / "model.safetensors")


def test_projections_of_one_input_are_fused_in_order(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    layer = load(folder).layers[0]
    prefix = "model.layers.0."
    qkv = torch.cat([tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.qkv.weight, qkv)
    assert torch.equal(layer.gate_up.weight, gate_up)


def test_shards_load_the_same_as_a_single_file(folder: Path, tmp_path: Path) -> None:
    sharded = tiny_models.build(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    own, expected = load(sharded), load(folder)
    assert torch.equal(own.lm_head.weight, expected.lm_head.weight)
    assert torch.equal(own.layers[2].down.weight, expected.layers[2].down.weight)


def test_weights_are_converted_to_the_wanted_dtype(folder: Path) -> None:
    expected = load(folder).embedding.bfloat16()
    assert torch.equal(load(folder, torch.bfloat16).embedding, expected)


def test_tied_embeddings_share_one_tensor_and_ignore_a_saved_head(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, "llama-tied")
    rewrite(folder, **{"lm_head.weight": torch.zeros(3)})
    weights = load(folder)
    assert weights.lm_head.weight is weights.embedding


def test_buffers_of_old_versions_are_ignored(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (Q_PROJ, None, f"1 tensors are missing, first {Q_PROJ}"),
        (Q_PROJ, torch.ones(2, 2), rf"{Q_PROJ} has shape \[2, 2\], .* asks for \[64, 64\]"),
        (Q_PROJ, torch.ones(64, 64, dtype=torch.int8), f"{Q_PROJ} has dtype torch.int8"),
        ("model.extra.weight", torch.ones(1), "unexpected tensor model.extra.weight"),
    ],
)
def test_a_wrong_tensor_is_named(
    folder: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    rewrite(folder, **{name: tensor})
    with pytest.raises(StartupError, match=message):
        load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StartupError, match=r"cannot read weights .*model\.safetensors"):
        load(folder)


def test_a_missing_shard_and_a_broken_index_are_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(StartupError, match=r"lacks the weights file absent\.safetensors"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(StartupError, match=r"index\.json: `weight_map` is missing"):
        load(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks the weights file model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match=r"pickled weights \(\.bin\) only"):
        load(folder)
