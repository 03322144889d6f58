"""A model as it lies on disk: an unchanged Hugging Face folder.

Router and workers read the same folder: the router for tokenizer, limits and default
sampling, the workers for config and weights. Every fault here is one line for the operator.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import snapshot_download

from core.errors import StartupError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja"]
_HUB_WEIGHTS = ["*.safetensors"]
_CONFIG_DIGEST_CHARS = 32
_HEAD_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
_NUM_PIECES = 64
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class DefaultSampling:
    """What generation_config.json says; a request's own fields come first."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelFolder:
    """The parts of a model folder that do not need torch."""

    path: Path
    architecture: str
    vocab_size: int
    context_length: int
    """Tokens of prompt and output together (`max_position_embeddings`)."""
    eos_token_ids: tuple[int, ...]
    default_sampling: DefaultSampling

    @property
    def served_name(self) -> str:
        """The name that clients use unless the operator gives another one."""
        return self.path.name

    @classmethod
    def load(cls, path: Path) -> ModelFolder:
        """Reads config.json and generation_config.json. Raises StartupError."""
        config = read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise StartupError(f"{path / 'config.json'}: `architectures` is missing")
        return cls(
            path=path,
            architecture=str(architectures[0]),
            vocab_size=_positive_int(config, "vocab_size", path),
            context_length=_positive_int(config, "max_position_embeddings", path),
            eos_token_ids=_eos_token_ids(generation, config, path),
            default_sampling=_default_sampling(generation, path),
        )


def resolve_model(name_or_path: str, *, with_weights: bool = True) -> Path:
    """The folder of a model: a path, or a hub name whose files are fetched once.

    Without weights, the hub is asked for the small files only. Raises StartupError with one line
    that says what to do.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _HUB_NAME.fullmatch(name_or_path):
        raise StartupError(
            f"model folder {name_or_path!r} does not exist; give a Hugging Face model folder "
            "or a hub name such as owner/model"
        )
    try:
        patterns = _HUB_FILES + _HUB_WEIGHTS * with_weights
        return Path(snapshot_download(name_or_path, allow_patterns=patterns))
    except Exception as error:
        # Whatever the hub client raises (network, permission, unknown name), the operator
        # can do the same about it.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartupError(
            f"model {name_or_path!r} is not a folder and could not be fetched from the hub "
            f"({reason}); give the path of a downloaded model folder"
        ) from error


def weight_files(path: Path) -> list[Path]:
    """The model's safetensors in name order: the files of its index, else the single one.

    Raises StartupError when one is missing.
    """
    index_file = path / "model.safetensors.index.json"
    if index_file.is_file():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index_file}: `weight_map` is missing")
        files = [path / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = [path / "model.safetensors"]
        if not files[0].is_file() and any(path.glob("*.bin")):
            raise StartupError(
                f"{path} has pickled weights (.bin) only; convert them to safetensors"
            )
    for file in files:
        if not file.is_file():
            raise StartupError(f"{path} lacks the weights file {file.name}")
    return files


def model_digest(path: Path) -> str:
    """Identity of a model revision: `config_digest`, and as much again of one over the weights.

    Of each weights file name, size and samples count (the first and last MiB and 64 pieces
    of 64 KiB at equal distances), so that it takes milliseconds for any size of model. Raises
    StartupError when a file is missing.
    """
    of_config = config_digest(path)
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            _digest_samples(digest, stream, size)
    return of_config + digest.hexdigest()[: 64 - len(of_config)]


def config_digest(path: Path) -> str:
    """What the digests of all models with this config begin with: SHA-256 in hex, cut short.

    For who has no weights. Raises StartupError without a config.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise StartupError(f"{config_file} does not exist")
    return hashlib.sha256(config_file.read_bytes()).hexdigest()[:_CONFIG_DIGEST_CHARS]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises StartupError when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds no JSON object")
    return content


def _digest_samples(digest: hashlib._Hash, stream: BinaryIO, size: int) -> None:
    digest.update(stream.read(_HEAD_BYTES))
    for piece in range(_NUM_PIECES):
        stream.seek(piece * size // _NUM_PIECES)
        digest.update(stream.read(_PIECE_BYTES))
    stream.seek(max(0, size - _HEAD_BYTES))
    digest.update(stream.read(_HEAD_BYTES))


def _positive_int(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"{path / 'config.json'}: `{key}` must be a positive integer")
    return value


def _eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], path: Path
) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    token_ids = value if isinstance(value, list) else [value]
    if any(type(token_id) is not int or token_id < 0 for token_id in token_ids):
        raise StartupError(f"{path}: `eos_token_id` must be a token id or a list of them")
    return tuple(token_ids)


def _default_sampling(generation: Mapping[str, Any], path: Path) -> DefaultSampling:
    def number(key: str, default: float) -> float:
        value = generation.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not abs(value) <= _INT32_MAX:
            raise StartupError(f"{path / 'generation_config.json'}: `{key}` must be a number")
        return float(value)

    repetition_penalty = number("repetition_penalty", 1.0)
    if not generation.get("do_sample"):
        return DefaultSampling(repetition_penalty=repetition_penalty)
    return DefaultSampling(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        # transformers samples from the 50 likeliest unless told otherwise; Baton's default,
        # as the protocol says, is off. Others write -1 for that.
        top_k=max(0, int(number("top_k", 0))),
        min_p=number("min_p", 0.0),
        repetition_penalty=repetition_penalty,
    )
