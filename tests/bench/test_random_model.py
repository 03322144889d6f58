"""A random model is a whole model folder."""

from __future__ import annotations

from pathlib import Path

from bench.chaos import MODEL
from bench.random_model import write_random_model
from core.model_folder import ModelFolder, model_digest
from core.tokenizer import Tokenizer
from engine.model_config import ModelConfig


def test_a_random_model_has_what_router_and_workers_read(tmp_path: Path) -> None:
    write_random_model(tmp_path, MODEL, seed=0)
    folder = ModelFolder.load(tmp_path)
    assert (folder.vocab_size, folder.context_length, folder.eos_token_ids) == (288, 512, (0,))
    assert len(Tokenizer(folder).encode("hello")) == 5
    assert ModelConfig.from_folder(tmp_path).dtype == "float32"


def test_a_seed_makes_one_model(tmp_path: Path) -> None:
    digests = []
    for index, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_random_model(folder, MODEL, seed)
        digests.append(model_digest(folder))
    assert digests[0] == digests[1] != digests[2]
